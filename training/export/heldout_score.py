"""The word error rate of an exported model on a run's held-out subset, from its audio."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from infra.store.object_store import Fetched, ObjectStore, StoreError
from pipeline.audio.decode import decode_utterance
from pipeline.audio.errors import AudioError
from pipeline.filterbank import SAMPLE_RATE_HZ
from pipeline.filterbank.log_mel import num_frames
from pipeline.records import Utterance, parse_utterance
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import HELDOUT, selection_step
from pipeline.steps.features import MIN_FRAMES, ExtractionConfig, audio_objects
from training.evaluate.word_errors import WordErrors, word_errors
from training.export.archive import ExportedModel
from training.export.recognizer import Recognizer, StreamingModel, StreamState


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """Hypothesis: the words of an utterance; None where its audio was refused, with the reason."""

    utterance: Utterance
    words: tuple[str, ...] | None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class HeldoutScore:
    """HeldoutScore: word errors over the utterances whose audio can be heard, and the others."""

    errors: WordErrors
    num_utterances: int
    num_refused: int


def score_heldout(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    features: ExtractionConfig,
    exported: ExportedModel,
    piece_s: float,
) -> HeldoutScore:
    """Count the word errors of the held-out subset, heard in pieces of `piece_s` seconds."""
    errors, num_utterances, num_refused = WordErrors(), 0, 0
    for found in transcribe_heldout(store, run_uri, corpus_uri, features, exported, piece_s):
        if found.words is None:
            num_refused += 1
            continue
        num_utterances += 1
        errors += word_errors((found.utterance.text or "").split(), found.words)
    return HeldoutScore(errors, num_utterances, num_refused)


def transcribe_heldout(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    features: ExtractionConfig,
    exported: ExportedModel,
    piece_s: float,
) -> Iterator[Hypothesis]:
    """Transcribe the held-out subset as extraction reads it: a speaker's utterances are a stream.

    So the causal mean is that of the features which the evaluation decodes.
    """
    heard = _Heldout(exported, StreamingModel(exported.network), features, piece_s)
    for output in read_manifest(store, run_uri, selection_step(HELDOUT)).outputs:
        lines = read_output(store, run_uri, output).decode().splitlines()
        utterances = [parse_utterance(line) for line in lines]
        settings = features.gets_in_flight, features.conversion
        audio = audio_objects(store, corpus_uri, utterances, *settings)
        yield from heard.transcribe(utterances, audio.read_decided())


@dataclass(frozen=True, slots=True)
class _Heldout:
    """_Heldout holds what all utterances of the subset share."""

    exported: ExportedModel
    model: StreamingModel
    features: ExtractionConfig
    piece_s: float

    def transcribe(
        self, utterances: Sequence[Utterance], audio: Iterator[Fetched | StoreError | AudioError]
    ) -> Iterator[Hypothesis]:
        """Yield the words of a selection file's utterances."""
        speaker, states = "", defaultdict[str | None, StreamState](self.model.start)
        for utterance, found in zip(utterances, audio, strict=True):
            if utterance.speaker_id != speaker:
                speaker, states = utterance.speaker_id, defaultdict(self.model.start)
            if isinstance(found, StoreError | AudioError):
                yield Hypothesis(utterance, None, str(found))
                continue
            try:
                words, states[utterance.stream] = self._hear(
                    utterance, found.data, states[utterance.stream]
                )
            except AudioError as error:
                yield Hypothesis(utterance, None, str(error))
            else:
                yield Hypothesis(utterance, words)

    def _hear(
        self, utterance: Utterance, data: bytes, state: StreamState
    ) -> tuple[tuple[str, ...], StreamState]:
        about = utterance.utterance_id, utterance.duration_s
        decoded = decode_utterance(data, *about, self.features.engine, self.features.conversion)
        samples = decoded.samples
        if num_frames(len(samples)) < MIN_FRAMES:
            raise AudioError("too_short", f"{num_frames(len(samples))} frames: need {MIN_FRAMES}")
        recognizer = Recognizer(self.exported, self.model, state=state)
        step = round(self.piece_s * SAMPLE_RATE_HZ)
        for first in range(0, len(samples), step):
            recognizer.accept(samples[first : first + step])
        return recognizer.finish().words, recognizer.state
