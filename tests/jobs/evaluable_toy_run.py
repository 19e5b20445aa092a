"""A run with a baseline, a teacher and a student of random weights, and speech to decode."""

from collections.abc import Sequence
from pathlib import Path

import torch

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BASELINE,
    HELDOUT,
    STUDENT,
    UNLABELLED,
    features_step,
)
from tests.training.sequence_training.toy_run import CONFIG, TREE, put_model
from tests.training.targets.unlabelled_toy_run import (
    BIDIRECTIONAL,
    write_transcribed,
    write_unlabelled_toy_run,
)
from tests.whole_path.processes import TINY
from training.models.store import make_model

SETTINGS = (
    f"models.teacher.num_units={BIDIRECTIONAL.num_units}",
    f"models.student.num_units={CONFIG.num_units}",
    f"models.student.look_ahead={CONFIG.look_ahead}",
    # At so small a scale a search finds no word.
    "evaluation.acoustic_scale=0.001",
    "evaluation.beam=40.0",
    "tuning={acoustic_scales=[0.1], ngram_orders=[], "
    "language_model_scales=[], insertion_penalties=[2.0]}",
)


def write_evaluable_toy_run(folder: Path) -> tuple[ObjectStore, str, str]:
    """Write the run below a folder, without evaluation; return store, run and corpus."""
    store, run_uri, corpus_uri = write_unlabelled_toy_run(folder)
    counts = read_manifest(store, run_uri, ALIGNMENT_STEP).statistics["senone_counts"]
    moments = read_manifest(store, run_uri, features_step(UNLABELLED)).statistics["moments"]
    for name in (BASELINE, STUDENT):
        torch.manual_seed(len(name))
        put_model(store, run_uri, name, make_model(CONFIG, TREE.num_senones), counts, moments)
    write_transcribed(store, run_uri, HELDOUT)
    return store, run_uri, corpus_uri


def options_of(run_uri: str, corpus_uri: str) -> Sequence[str]:
    """Return the options of the job that evaluates the run."""
    given = (f'corpus.uri="{corpus_uri}"', *SETTINGS)
    settings = [part for each in given for part in ("--set", each)]
    return ["--recipe", str(TINY), "--run", run_uri, *settings]
