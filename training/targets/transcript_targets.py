"""Targets of transcripts: what recognizers heard, aligned by the teacher, as k best logits.

The words that any recognizer wrote of an utterance are read as the lexicon's, and become a graph of
readings with garbage beside each. Forward-backward over the teacher's scores gives each senone's
probability at each frame; frames of garbage, and utterances that cannot be aligned, keep the
teacher's own targets. The run's own lattice of an utterance may say how far a frame is trusted.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Float32, Float64
from scipy.special import log_softmax

from infra.store.object_store import ObjectStore
from pipeline.kbest import KBest, KBestOfTranscript, OwnKBest, TeacherFailure, select_kbest
from pipeline.records import Hypothesis
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import ALIGNMENT_STEP
from pipeline.steps.targets import WITHOUT_TRANSCRIPT, TeacherInput
from training.align.labelled import read_lexicon, read_tree
from training.decode.graph import DecodingGraph
from training.decode.letter_to_sound import LetterToSound
from training.decode.lexicon import MAX_NAMED, Lexicon, Pronunciation
from training.decode.senones import SenoneTree
from training.decode.transcript_graph import Garbage
from training.models.store import log_priors
from training.sequence_training.forward_backward import (
    StatePosteriors,
    interpolated_kbest,
    state_posteriors,
)
from training.sequence_training.lattice_decoder import LatticeError, decode_lattice
from training.settings.decoding import EvaluationConfig, LatticeTargetsConfig, TranscriptsConfig
from training.targets.lattice_targets import LatticeSearch, Logits, Score, targets_of
from training.targets.rover import Heard, slot_words
from training.targets.text_normalization import Normalizer

MAX_WORDS = 10_000
"""Two such texts, of an hour of speech, are joined in 0.5 GB."""

OPENING_COST = -math.log(0.1)
"""What garbage costs besides its frames, wherever it begins, in nats."""

ROUNDING = 1e-3
"""So much may a score be beyond its range."""

BEAMS = LatticeTargetsConfig(beam=100.0, max_active=1_000_000, lattice_beam=8.0)
"""So wide that a path may fall behind by some twenty words, and a graph is small.

At a beam of 20, a path that began wrong could not drop as many words as it had to.
"""


class UnusableTranscriptError(ValueError):
    """UnusableTranscriptError says why an utterance's targets are not of a transcript."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True)
class TranscriptPlace:
    """TranscriptPlace says where the words and senones of a run are, and how texts are read."""

    store: ObjectStore
    run_uri: str
    corpus_uri: str
    config: TranscriptsConfig


@dataclass(frozen=True, eq=False)
class TranscriptAligner:
    """TranscriptAligner aligns what recognizers heard by the scores of a teacher."""

    lexicon: Lexicon
    tree: SenoneTree
    garbage: Garbage
    normalizer: Normalizer
    config: TranscriptsConfig
    letters: LetterToSound | None

    @classmethod
    def of(
        cls,
        lexicon: Lexicon,
        tree: SenoneTree,
        config: TranscriptsConfig,
        letters: LetterToSound | None = None,
    ) -> "TranscriptAligner":
        """Make what all utterances share; `letters` pronounce words that the lexicon lacks."""
        normalizer = Normalizer(lexicon, config.language)
        return cls(lexicon, tree, Garbage.beside(lexicon, tree), normalizer, config, letters)

    @lru_cache(maxsize=4)  # noqa: B019 - an utterance's offsets follow each other
    def graph(self, hypotheses: tuple[Hypothesis, ...]) -> DecodingGraph:
        """Build the graph of some texts; UnusableTranscriptError says why there is none."""
        config, lexicon = self.config, self.lexicon.pronunciations
        heard = self._heard(hypotheses)
        words = slot_words(heard, config.agreement)
        heard_words = {word for each in words for word in each.words}
        spelled = self._spelled(heard_words - lexicon.keys())
        known = {word for word in heard_words if word in lexicon or word in spelled}
        spoken = [each for each in words if any(each.confidences)]
        unknown = [each for each in spoken if not each.is_known(known)]
        if len(unknown) > config.max_unknown * len(spoken):
            named = sorted({word for each in unknown for word in each.words if word not in known})
            raise UnusableTranscriptError(
                "unknown_words",
                f"{len(unknown)} of {len(spoken)} words are not in the lexicon: need at most "
                f"{config.max_unknown:.0%}: {', '.join(map(repr, named[:MAX_NAMED]))}",
            )
        slots = [each.slot(known, config.min_confidence) for each in words]
        if not any(any(slot.readings) for slot in slots):
            raise UnusableTranscriptError(
                "low_confidence", f"no word is trusted to {config.min_confidence:g}"
            )
        return self.garbage.graph(slots, OPENING_COST, spelled)

    def _heard(self, hypotheses: Sequence[Hypothesis]) -> list[Heard]:
        """Read all texts; UnusableTranscriptError unless one with words can be used.

        A recognizer that heard no word votes against those of the others. One whose score is of
        another kind would be left out of each utterance, so it leaves out the utterance.
        """
        heard, refused = list[Heard](), list[UnusableTranscriptError]()
        for each in hypotheses:
            confidence = confidence_of(each, self.config)
            try:
                readings = self.normalizer(each.text)
                if len(readings) > MAX_WORDS:
                    most = f"a text of more than {MAX_WORDS} words: cut the recording"
                    raise UnusableTranscriptError("too_long", most)
                heard.append(Heard(readings, confidence))
            except UnusableTranscriptError as error:
                refused.append(error)
        if any(each.readings for each in heard):
            return heard
        if refused:
            raise refused[0]
        reason = "empty_transcript" if hypotheses else "no_transcript"
        raise UnusableTranscriptError(reason, f"no word in {len(hypotheses)} transcripts")

    def _spelled(self, words: Iterable[str]) -> dict[str, Pronunciation]:
        """Pronounce words that the lexicon lacks by their letters, as far as these have sounds."""
        if self.letters is None:
            return {}
        found = {word: self.letters.pronounce(word) for word in words}
        return {word: phones for word, phones in found.items() if phones}

    def posteriors(
        self,
        hypotheses: tuple[Hypothesis, ...],
        scores: Float32[np.ndarray, "frames senones"],
        frame_cost: float,
    ) -> StatePosteriors:
        """Return the senones of the words at each frame; what is missing of 1 is garbage.

        `scores` are log-likelihoods, and `frame_cost` is what a frame of garbage costs, both
        scaled. UnusableTranscriptError says why there are none.
        """
        graph = self.graph(hypotheses)
        try:
            of_all = self.garbage.scores(scores, frame_cost)
            found = state_posteriors(decode_lattice(graph, of_all, BEAMS), of_all)
        except LatticeError as error:
            raise UnusableTranscriptError("alignment_failed", str(error)) from error
        is_word = found.senones != self.garbage.senone
        share = 1 - found.probabilities[is_word].sum() / len(scores)
        if share > self.config.max_garbage:
            raise UnusableTranscriptError(
                "not_aligned",
                f"{share:.0%} of {len(scores)} frames are garbage: need at most "
                f"{self.config.max_garbage:.0%}",
            )
        return StatePosteriors(
            found.frames[is_word], found.senones[is_word], found.probabilities[is_word]
        )


def confidence_of(hypothesis: Hypothesis, config: TranscriptsConfig) -> float:
    """Return the probability that a word is right, by the recognizer's score; 1 without one.

    UnusableTranscriptError for a score of another kind, which would trust words too much.
    """
    score, is_log = hypothesis.score, config.scores == "log_probability"
    if score is None:
        return 1.0
    least, most = (-math.inf, 0.0) if is_log else (0.0, 1.0)
    if not least - ROUNDING <= score <= most + ROUNDING:
        raise UnusableTranscriptError(
            "wrong_score", f"{score:g} is no {config.scores}: see targets.transcripts.scores"
        )
    return min(max(math.exp(score) if is_log else score, 0.0), 1.0)


@lru_cache(maxsize=1)
def open_aligner(place: TranscriptPlace) -> TranscriptAligner:
    """Read this process's lexicon and tree, or return the last ones."""
    stored = read_lexicon(place.store, place.run_uri, place.corpus_uri, [ALIGNMENT_STEP])
    tree = read_tree(place.store, place.run_uri)
    letters = stored.letters() if stored.unknown_words == "letters" else None
    return TranscriptAligner.of(stored.parse(), tree, place.config, letters)


@dataclass(frozen=True, slots=True, eq=False)
class TranscriptTeacher:
    """TranscriptTeacher answers the targets step: logits from a device, alignment on this core."""

    score: Score
    k: int
    place: TranscriptPlace
    acoustic_scale: float
    log_priors: Float32[np.ndarray, " senones"]
    lattices: LatticeSearch | None
    tail_samples: int = 0

    def __call__(self, inputs: Iterable[TeacherInput]) -> Iterator[KBest | TeacherFailure]:
        """Yield each utterance's targets, or the teacher's own where no transcript is aligned."""
        return targets_of(self.score, inputs, self._targets)

    def _targets(self, logits: Logits, given: TeacherInput) -> KBest | TeacherFailure:
        columns, config = (self.k, self.tail_samples, given.seed), self.place.config
        if config.weight == 0 or not len(logits):
            return select_kbest(logits, *columns)
        # Posteriors divided by priors, as a hybrid system decodes (003 II-A).
        log_likelihoods = log_softmax(logits, axis=1) - self.log_priors
        scores = (self.acoustic_scale * log_likelihoods).astype(np.float32)
        try:
            found = open_aligner(self.place).posteriors(
                given.hypotheses, scores, self.acoustic_scale * config.garbage_cost
            )
        except UnusableTranscriptError as error:
            if config.unaligned == "row":
                return TeacherFailure(str(error))
            own = select_kbest(logits, *columns)
            return OwnKBest.of(own, WITHOUT_TRANSCRIPT, error.reason, error.detail)
        weights = np.full(len(logits), config.weight)
        if self.lattices:
            lattice = own_posteriors(self.lattices, log_likelihoods)
            weights *= trust_of_lattice(found, lattice, len(logits), config.lattice_agreement)
        return transcript_kbest(logits, found, weights, *columns)


def own_posteriors(
    lattices: LatticeSearch, log_likelihoods: Float32[np.ndarray, "frames senones"]
) -> StatePosteriors:
    """Return the state posteriors of the run's own lattice, empty for an utterance without one."""
    try:
        return lattices.posteriors(log_likelihoods)
    except LatticeError:
        return StatePosteriors(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0))


def trust_of_lattice(
    words: StatePosteriors, own: StatePosteriors, num_frames: int, share: float
) -> Float64[np.ndarray, " {num_frames}"]:
    """Return 1 - share + share a of each frame, where a is the mass that both have in common."""
    return 1 - share + share * overlap(words, own, num_frames)


def overlap(
    words: StatePosteriors, others: StatePosteriors, num_frames: int
) -> Float64[np.ndarray, " {num_frames}"]:
    """Return the mass that two distributions over senones share at each frame, 1 if they are equal.

    Both are normalized, frame by frame: it is 1 less their total variation distance.
    """
    num_senones = 1 + max(each.senones.max(initial=0) for each in (words, others))
    sums = []
    for each in (words, others):
        masses = np.bincount(each.frames, each.probabilities, num_frames)
        keys, places = np.unique(each.frames * num_senones + each.senones, return_inverse=True)
        sums.append((keys, np.bincount(places, each.probabilities / masses[each.frames])))
    (keys, some), (other_keys, rest) = sums
    both, ours, theirs = np.intersect1d(keys, other_keys, True, return_indices=True)
    shared = np.bincount(both // num_senones, np.minimum(some[ours], rest[theirs]), num_frames)
    return np.minimum(shared, 1.0)


def transcript_kbest(
    logits: Float32[np.ndarray, "frames senones"],
    words: StatePosteriors,
    weights: Float64[np.ndarray, " frames"],
    k: int,
    tail_samples: int = 0,
    seed: int = 0,
) -> KBestOfTranscript:
    """Keep the k best of (1 - w) softmax(logits) + w words, frame by frame.

    The posteriors of the words sum to m at a frame, and 1 - m is garbage's: w is the frame's weight
    times m, of posteriors that sum to 1. Where m is 0 these are the logits' own k best, to the bit.
    """
    masses = np.bincount(words.frames, words.probabilities, minlength=len(logits))
    shares = words.probabilities / masses[words.frames]
    weights = weights * np.minimum(masses, 1.0)
    normalized = StatePosteriors(words.frames, words.senones, shares)
    kbest = interpolated_kbest(logits, normalized, weights, k, tail_samples, seed)
    return KBestOfTranscript(
        kbest.senones,
        kbest.logits,
        kbest.log_z,
        float(weights.mean()),
        tail_samples=kbest.tail_samples,
    )


def open_transcript_teacher(
    place: TranscriptPlace,
    score: Score,
    k: int,
    evaluation: EvaluationConfig,
    lattices: LatticeSearch | None = None,
    tail_samples: int = 0,
) -> TranscriptTeacher:
    """Open the teacher of a run, with the priors of the labelled data.

    `score` makes the logits, by servers of `serve_logits`; `lattices` weigh transcripts.
    """
    stated = read_manifest(place.store, place.run_uri, ALIGNMENT_STEP)
    counts = stated.statistic("senone_counts", list[int])
    acoustic_scale = place.config.acoustic_scale or evaluation.acoustic_scale
    priors = log_priors(counts).numpy()
    return TranscriptTeacher(score, k, place, acoustic_scale, priors, lattices, tail_samples)
