"""Score the development speakers once with each model, and decode the scores at any settings.

Workers of a cluster import this module, so it imports nothing that only a driver has.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext, once
from pipeline.runs.manifest import Output, read_output
from pipeline.shards import FeatureRow
from training.configuration.decoding import DecodingSettings
from training.decoding.decoder import decode
from training.evaluation.slices import DecodingPlace, Piece, Slice, scored_pieces
from training.evaluation.word_errors import WordErrors, word_errors
from training.tensor_encoding import decode_state, encode_state

_MAX_STORED_SCORES = 2**26
"""An object holds about so many scores, 0.25 GB: a task reads one after the other."""


@dataclass(frozen=True, slots=True)
class ScoringTask:
    """ScoringTask is one slice whose log-likelihoods a model computes, for all trials to read."""

    name: str
    place: DecodingPlace
    rows: Slice
    model: str

    @property
    def context(self) -> StepContext:
        """The step's context."""
        return self.place.context


@dataclass(frozen=True, slots=True)
class TrialTask:
    """TrialTask is the stored scores of one slice, to decode at several settings."""

    name: str
    place: DecodingPlace
    scores: tuple[Output, ...]
    settings: tuple[DecodingSettings, ...]

    @property
    def context(self) -> StepContext:
        """The step's context."""
        return self.place.context


@once
def score_slice(task: ScoringTask) -> Commit:
    """Store the log-likelihoods of a slice in float32, so that trials decode evaluation's bits."""
    rows = task.place.rows(task.rows)
    context = task.context
    outputs = tuple(
        context.put_output(task.name, ".npz", _encode(rows, batch), Tally())
        for batch in _batches(scored_pieces(rows, task.place.model(task.model)))
    )
    return context.commit(
        Commit(task.name, context.fingerprint, outputs, None, tally_in=Tally(), quarantined=Tally())
    )


@once
def try_settings(task: TrialTask) -> Commit:
    """Decode a slice's scores at each settings; the commit has the word errors of each."""
    context = task.context
    graphs = task.place.graphs(*task.place.lexicon_and_tree(), task.settings)
    words: dict[int, dict[int, list[list[str]]]] = defaultdict(dict)
    references: dict[int, list[str]] = {}
    for output in task.scores:
        for row, first, text, scores in decode_state(
            read_output(context.store, context.run_uri, output)
        ):
            references[row] = text.split()
            words[row][first] = [
                decode(graph, each.acoustic_scale * scores.numpy(), task.place.decoder)
                for each, graph in zip(task.settings, graphs, strict=True)
            ]
    errors = [
        sum((_errors(references[row], words[row], number) for row in words), WordErrors())
        for number in range(len(task.settings))
    ]
    statistics = {"errors": [asdict(each) for each in errors]}
    record = (task.name, context.fingerprint, (), None)
    return context.commit(
        Commit(*record, tally_in=Tally(), quarantined=Tally(), statistics=statistics)
    )


def _errors(reference: list[str], pieces: dict[int, list[list[str]]], number: int) -> WordErrors:
    found = [word for first in sorted(pieces) for word in pieces[first][number]]
    return word_errors(reference, found)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    for piece in pieces:
        sizes = sum(each.log_likelihoods.size for each in (*batch, piece))
        if batch and sizes > _MAX_STORED_SCORES:
            yield batch
            batch = []
        batch.append(piece)
    if batch:
        yield batch


def _encode(rows: list[FeatureRow], batch: list[Piece]) -> bytes:
    return encode_state(
        [
            (p.row, p.first_frame, rows[p.row].text or "", torch.from_numpy(p.log_likelihoods))
            for p in batch
        ]
    )
