"""Run the data pipeline's four steps in a plain loop, on a corpus of tones in any store."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from infra.store.object_store import ObjectStore
from pipeline.kbest import KBest, select_kbest
from pipeline.runs.manifest import Manifest, manifest_uri, read_manifest, read_output
from pipeline.settings import ExtractionConfig, RepartitionConfig, SelectionConfig, TargetsConfig
from pipeline.shards import read_features, read_partition, read_targets
from pipeline.steps.features import extract_features
from pipeline.steps.repartition import repartition
from pipeline.steps.selection.select import metadata_uri, select_utterances
from pipeline.steps.targets import generate_targets
from tests.in_process_teacher import teacher_of
from tests.small_corpus import local_store, serially, write_corpus

T = TypeVar("T")
R = TypeVar("R")
Distribute = Callable[[Sequence[T], Callable[[T], R], str], list[R]]

NUM_SENONES = 30
SEED = 3
GETS_IN_FLIGHT = 8
OUTPUTS = ("selection", "features", "targets", "partitions")


def label(frames: np.ndarray) -> KBest:
    """Return the k best of logits that depend on the frames alone."""
    return select_kbest(_logits(frames), 4)


teacher = teacher_of(label)


def _logits(frames: np.ndarray) -> np.ndarray:
    shape = (frames.shape[1], NUM_SENONES)
    projection = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return np.tanh(frames.astype(np.float32) @ projection / 20) * 5


def put_teacher(store: ObjectStore, run_uri: str) -> None:
    """Put the manifest of a teacher's training, which target generation requires."""
    manifest = Manifest("models/teacher", {}, {}, ())
    store.put(manifest_uri(run_uri, "models/teacher"), manifest.to_bytes())


def four_steps(
    store: ObjectStore, run_uri: str, corpus_uri: str, distribute: Distribute = serially
) -> dict[str, Callable[[], object]]:
    """Select, extract, label and repartition the unlabelled subset; return each step as a call."""
    budget = 0.05
    return {
        "selection": lambda: select_utterances(
            store,
            run_uri,
            "unlabelled",
            metadata_uri(corpus_uri, "unlabelled"),
            SelectionConfig(hours=0.0, file_hours=20 / 3600, seed=SEED),
            budget,
            distribute,
        ),
        "features": lambda: extract_features(
            store,
            run_uri,
            "unlabelled",
            corpus_uri,
            ExtractionConfig(gets_in_flight=GETS_IN_FLIGHT, seed=SEED),
            budget,
            distribute,
        ),
        "targets": lambda: generate_targets(
            store, run_uri, TargetsConfig(4, 500, SEED), teacher, distribute
        ),
        "partitions": lambda: repartition(
            store, run_uri, RepartitionConfig(20 / 3600, 2, SEED), distribute
        ),
    }


def selected_corpus(
    folder: Path, num_speakers: int, num_each: int, file_hours: float = 1.0
) -> tuple[ObjectStore, str, str]:
    """Write a corpus of tones, and select all of it; return store, run and corpus."""
    store, run_uri, corpus_uri = local_store(folder)
    write_corpus(store, corpus_uri, "unlabelled", num_speakers, num_each)
    source, config = metadata_uri(corpus_uri, "unlabelled"), SelectionConfig(0.0, file_hours, SEED)
    select_utterances(store, run_uri, "unlabelled", source, config, 0.0, serially)
    return store, run_uri, corpus_uri


def rows_of(store: ObjectStore, run_uri: str, step: str) -> list[Any]:
    """Return the rows of all shards of a step, in the manifest's order."""
    read = {"features": read_features, "targets": read_targets, "partitions": read_partition}[step]
    outputs = read_manifest(store, run_uri, f"{step}/unlabelled").outputs
    return [row for each in outputs for row in read(read_output(store, run_uri, each))]


def manifests(store: ObjectStore, run_uri: str) -> dict[str, bytes]:
    """Return the manifests of the four steps, as stored."""
    return {step: store.get(manifest_uri(run_uri, f"{step}/unlabelled")) for step in OUTPUTS}
