"""Decode a slice of the held-out subset with one model: words, times, confidence, frames.

Workers of a cluster import this module, so it imports nothing that only a driver has.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32

from pipeline.filterbank import FRAME_SHIFT_MS
from pipeline.records import WITHOUT_PLACEMENT, Tally
from pipeline.runs.commit import Commit, StepContext, once
from pipeline.runs.manifest import Output, read_output
from pipeline.shards import FeatureRow
from pipeline.splicing import STACK, low_rate_alignment
from training.configuration.decoding import DecodingSettings
from training.decoding.alignment import Unaligned
from training.decoding.decoder import BestPath, best_path
from training.decoding.graph.hclg import DecodingGraph
from training.decoding.lexicon import Lexicon
from training.decoding.senones.senone_tree import SenoneTree
from training.decoding.word_times import word_spans
from training.evaluation.decoded import (
    DecodedUtterance,
    DecodedWord,
    read_decoded,
    write_decoded,
)
from training.evaluation.slices import DecodingPlace, Piece, Slice, scored_pieces
from training.models.store import TrainedModel
from training.targets.alignment import align_row

_LOW_RATE_MS = STACK * FRAME_SHIFT_MS


@dataclass(frozen=True, slots=True)
class AlignedBefore:
    """AlignedBefore: the slice as the first model decoded it, with the labels of its alignment."""

    decoded: Output


@dataclass(frozen=True, slots=True)
class AlignsAt:
    """AlignsAt: this task's model aligns the transcripts, at the alignment's acoustic scale."""

    acoustic_scale: float


@dataclass(frozen=True, slots=True)
class HypothesisTask:
    """HypothesisTask is one slice to decode with one model, at its settings."""

    name: str
    place: DecodingPlace
    rows: Slice
    model: str
    settings: DecodingSettings
    labels: AlignedBefore | AlignsAt

    @property
    def context(self) -> StepContext:
        """The step's context."""
        return self.place.context


@dataclass(frozen=True, slots=True, eq=False)
class _Decoder:
    """_Decoder holds model, lexicon, tree and graph of a task."""

    task: HypothesisTask
    model: TrainedModel
    lexicon: Lexicon
    tree: SenoneTree
    graph: DecodingGraph


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """_Found is kept of a piece once its logits are released."""

    first_frame: int
    path: BestPath | None
    words: tuple[DecodedWord, ...]
    best_senones: np.ndarray
    labels: tuple[int, ...]


@once
def decode_slice(task: HypothesisTask) -> Commit:
    """Decode the utterances of a slice on a worker; its logits never leave the task."""
    place = task.place
    lexicon, tree = place.lexicon_and_tree()
    (graph,) = place.graphs(lexicon, tree, [task.settings])
    decoder = _Decoder(task, place.model(task.model), lexicon, tree, graph)
    rows = place.rows(task.rows)
    found: dict[int, list[_Found]] = defaultdict(list)
    for piece in scored_pieces(rows, decoder.model):
        found[piece.row].append(_decode(decoder, rows[piece.row], piece))
    known = _labels_before(task)
    utterances = [
        _decoded(row, sorted(found[number], key=lambda each: each.first_frame), known)
        for number, row in enumerate(rows)
    ]
    tally = Tally(len(rows), sum(row.duration_ms for row in rows))
    output = task.context.put_output(task.name, ".jsonl", write_decoded(utterances), tally)
    fingerprint = task.context.fingerprint
    return task.context.commit(
        Commit(task.name, fingerprint, (output,), None, tally_in=tally, quarantined=Tally())
    )


def _labels_before(task: HypothesisTask) -> Mapping[str, tuple[int, ...]]:
    if isinstance(task.labels, AlignsAt):
        return {}
    store, run_uri = task.context.store, task.context.run_uri
    before = read_decoded(read_output(store, run_uri, task.labels.decoded))
    return {each.utterance_id: each.labels for each in before}


def _decode(decoder: _Decoder, row: FeatureRow, piece: Piece) -> _Found:
    """Search the best path of a piece, and align it where this task's model aligns."""
    task, scores = decoder.task, piece.log_likelihoods
    path = best_path(decoder.graph, task.settings.acoustic_scale * scores, task.place.decoder)
    # Posteriors are the likelihoods times the priors; the best senone is theirs.
    log_posteriors = scores + decoder.model.log_priors.numpy()
    words = _timed_words(decoder, path, log_posteriors, piece.first_frame) if path else ()
    is_whole = len(scores) == len(row.features) // STACK
    labels: tuple[int, ...] = ()
    if isinstance(task.labels, AlignsAt) and is_whole:
        scaled = task.labels.acoustic_scale * scores
        aligned = align_row(row, scaled, decoder.lexicon, decoder.tree)
        # A transcript with a word that the lexicon lacks has errors to count, and no alignment.
        if not isinstance(aligned, Unaligned):
            labels = tuple(low_rate_alignment(aligned, 0).tolist())
    return _Found(piece.first_frame, path, words, log_posteriors.argmax(axis=1), labels)


def _timed_words(
    decoder: _Decoder,
    path: BestPath,
    log_posteriors: Float32[np.ndarray, "frames senones"],
    first_frame: int,
) -> tuple[DecodedWord, ...]:
    spans = word_spans(path.senones, path.words, decoder.lexicon, decoder.tree)
    of_path = log_posteriors[np.arange(len(path.senones)), path.senones]
    return tuple(
        DecodedWord(
            word,
            _LOW_RATE_MS * (first_frame + span.start),
            _LOW_RATE_MS * (span.end - span.start),
            _confidence(of_path[span.start : span.end]),
        )
        for word, span in zip(path.words, spans, strict=True)
    )


def _confidence(log_posteriors: Float32[np.ndarray, " frames"]) -> float:
    """Return the geometric mean of posteriors, from 0.0001, as of a word without frames."""
    mean = np.exp(log_posteriors.mean(dtype=np.float64)) if len(log_posteriors) else 0.0
    # Four digits, as the last bits differ between devices. sclite's normalized cross-entropy is
    # infinite where a word is wrong at 1 or right at 0.
    return round(float(np.clip(mean, 1e-4, 1 - 1e-4)), 4)


def _decoded(
    row: FeatureRow, pieces: Sequence[_Found], known: Mapping[str, tuple[int, ...]]
) -> DecodedUtterance:
    """Put the pieces of an utterance together, and hold its frames against the labels."""
    own = pieces[0].labels if len(pieces) == 1 else ()
    labels = np.array(known.get(row.utterance_id, own), np.int64)
    best = np.concatenate([piece.best_senones for piece in pieces]) if len(labels) else labels
    return DecodedUtterance(
        utterance_id=row.utterance_id,
        speaker_id=row.speaker_id,
        placement=row.placement or WITHOUT_PLACEMENT,
        duration_ms=row.duration_ms,
        reference=tuple((row.text or "").split()),
        words=tuple(word for piece in pieces for word in piece.words),
        has_failed=any(piece.path is None for piece in pieces),
        num_aligned=len(labels),
        num_correct=int(np.count_nonzero(best == labels)),
        labels=own,
    )
