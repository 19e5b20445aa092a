"""Slices of a subset: some minutes of speech, which a task decodes with one model."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from jaxtyping import Float32

from infra.store.object_store import ObjectStore, scan_checked
from pipeline.filterbank import STACK
from pipeline.runs.commit import StepContext
from pipeline.runs.engine import Distribute, StepRun
from pipeline.runs.manifest import Manifest, Output, read_manifest, read_output
from pipeline.runs.names import task_name
from pipeline.shards import FeatureRow, read_feature_texts, read_features
from pipeline.splicing import num_low_rate_frames
from training.align.network_alignment import batched_log_likelihoods
from training.decode.decoder import DecoderConfig, FoundLattice, find_lattice
from training.decode.rescoring import SecondPass
from training.evaluate.stored_graphs import BuiltGraphs
from training.models.store import TrainedModel, load_model
from training.settings.decoding import DecodingSettings, EvaluationConfig
from training.settings.models import ModelConfig

SLICE_MS = 600_000
"""The speech of a task, in milliseconds: about ten minutes, so that hours use many cores."""

MAX_PIECE_FRAMES = 20_000
"""The most low-rate frames that are scored and searched at once: ten minutes, 0.25 GB of logits.

At 3,183 senones. A longer utterance is decoded in pieces, and its hypotheses are put together.
"""


@dataclass(frozen=True, slots=True)
class ModelsToDecode:
    """ModelsToDecode: the forms of models by name, and where and how the tasks of each one run."""

    forms: Mapping[str, ModelConfig]
    distribute: Distribute
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Slice:
    """Slice: rows `start` to `stop` of a feature shard; its number makes names of tasks."""

    name: str
    features: Output
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class DecodingPlace:
    """DecodingPlace holds what all tasks of a decoding step share.

    Models compute on `device`, the search on the CPU.
    """

    context: StepContext
    corpus_uri: str
    graphs: BuiltGraphs
    decoder: DecoderConfig
    forms: Mapping[str, ModelConfig]
    device: str

    @classmethod
    def of(
        cls, step: StepRun, corpus_uri: str, config: EvaluationConfig, models: ModelsToDecode
    ) -> "DecodingPlace":
        """Return what the tasks of a step share; ObjectNotFound where the run has no graph."""
        context = step.context.scratch
        graphs = BuiltGraphs.of(context.store, context.run_uri)
        decoder = DecoderConfig(config.beam, config.max_active, config.lattice_beam)
        return cls(context, corpus_uri, graphs, decoder, models.forms, models.device)

    def model(self, name: str) -> TrainedModel:
        """Load a model of the run for this task, which has one core."""
        torch.set_num_threads(1)
        device = torch.device(self.device)
        store, run_uri = self.context.store, self.context.run_uri
        return load_model(store, run_uri, name, self.forms[name]).to(device)

    def rows(self, some: Slice) -> list[FeatureRow]:
        """Read the rows of a slice."""
        data = read_output(self.context.store, self.context.run_uri, some.features)
        return read_features(data, range(some.start, some.stop))

    def find_lattice(
        self, log_likelihoods: Float32[np.ndarray, "frames senones"], acoustic_scale: float
    ) -> FoundLattice | None:
        """Search log-likelihoods at scale 1; None where no path is left."""
        scores = np.float32(acoustic_scale) * log_likelihoods
        return find_lattice(self.graphs.graph, scores, self.decoder)

    def second_pass(self, settings: DecodingSettings) -> SecondPass:
        """Map what rescores the lattices at some settings."""
        return self.graphs.second_pass(settings, self.decoder.lattice_beam)


@dataclass(frozen=True, slots=True)
class DecodingTask:
    """DecodingTask is a task of a decoding step: its name, and what it shares with all others."""

    name: str
    place: DecodingPlace

    @property
    def context(self) -> StepContext:
        """The step's context."""
        return self.place.context


def slices(features: Manifest) -> list[Slice]:
    """Cut each shard into slices of about SLICE_MS with equal numbers of utterances."""
    found = []
    for number, output in enumerate(features.outputs):
        rows = output.utterances
        parts = max(1, min(rows, round(output.duration_ms / SLICE_MS)))
        bounds = [rows * part // parts for part in range(parts + 1)]
        for part, (start, stop) in enumerate(pairwise(bounds)):
            found.append(Slice(f"{task_name(number)}-{part:04d}", output, start, stop))
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Piece: some of a row's low-rate frames, from `first_frame` on, and their log-likelihoods."""

    row: int
    first_frame: int
    log_likelihoods: Float32[np.ndarray, "frames senones"]


def scored_pieces(rows: Sequence[FeatureRow], model: TrainedModel) -> Iterator[Piece]:
    """Score rows, each frame once, in pieces of at most MAX_PIECE_FRAMES; the shortest first.

    The log-likelihoods are at scale 1.
    """
    step = STACK * MAX_PIECE_FRAMES
    cuts = [
        (number, start)
        for number, row in enumerate(rows)
        for start in range(0, STACK * num_low_rate_frames(len(row.features), 0), step)
    ]
    parts = [
        replace(rows[number], features=rows[number].features[start : start + step])
        for number, start in cuts
    ]
    for position, scores in batched_log_likelihoods(parts, model, 1.0):
        number, start = cuts[position]
        yield Piece(number, start // STACK, scores)


@dataclass(frozen=True, slots=True)
class OutOfVocabulary:
    """OutOfVocabulary: the words of transcripts, and those that no hypothesis has.

    Each of these makes an error of every model. Types are different words.
    """

    num_words: int
    num_unknown: int
    num_types: int
    num_unknown_types: int


def out_of_vocabulary(
    store: ObjectStore, run_uri: str, features: str, known: Collection[str]
) -> OutOfVocabulary:
    """Count the words of a subset's transcripts that are not `known`; reads no features.

    ValueError for a subset without utterances, or without words.
    """
    subset = features.rpartition("/")[2]
    outputs = read_manifest(store, run_uri, features).outputs
    if not outputs:
        raise ValueError(f"the {subset} subset is empty: list speakers in {subset}.speakers")
    counts = Counter[str]()
    for output in outputs:
        for text in scan_checked(store, output.uri(run_uri), read_feature_texts):
            counts.update(text.split())
    if not counts:
        raise ValueError(f"the {subset} subset has no words: list others in {subset}.speakers")
    unknown = [count for word, count in counts.items() if word not in known]
    return OutOfVocabulary(
        num_words=counts.total(),
        num_unknown=sum(unknown),
        num_types=len(counts),
        num_unknown_types=len(unknown),
    )
