"""generate_targets by lattices of a teacher of the run, whose search development speakers tune."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.devices.device_client import RequestStream
from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    DEV,
    GRAPH_STEP,
    TARGETS_TUNING_STEP,
    TEACHER,
    UNLABELLED,
    features_step,
    model_step,
    sequence_trained,
)
from tests.in_process_teacher import answers_here
from tests.job_programs import RunJob
from tests.small_corpus import plain_loop
from tests.training.sequence_training.toy_run import TREE, put_model
from tests.training.targets.unlabelled_toy_run import (
    BIDIRECTIONAL,
    write_transcribed,
    write_unlabelled_toy_run,
)
from tests.whole_path.processes import TINY
from training.evaluate.graph_building import build_graphs
from training.models.store import make_model
from training.settings.recipe import read_recipe

LABELS = sequence_trained(TEACHER)
LATTICE = (
    "targets.source='lattice'",
    "sequence_training.teacher=true",
    f"models.teacher.num_units={BIDIRECTIONAL.num_units}",
    # At so small a scale the search finds no word; order 2 has as many errors as order 1.
    "evaluation.acoustic_scale=0.001",
    "evaluation.ngram_order=1",
    "evaluation.beam=40.0",
    "tuning={acoustic_scales=[0.1], ngram_orders=[2], "
    "language_model_scales=[], insertion_penalties=[]}",
)
STATED = "targets.lattices={acoustic_scale = 0.1, ngram_order = 1}"
RunOne = Callable[..., dict[str, Any]]


@pytest.fixture
def place(tmp_path: Path) -> tuple[ObjectStore, str, str]:
    """A run with unlabelled features, a teacher, and another that is named as trained by sMBR."""
    store, run_uri, corpus_uri = write_unlabelled_toy_run(tmp_path)
    counts = read_manifest(store, run_uri, ALIGNMENT_STEP).statistics["senone_counts"]
    moments = read_manifest(store, run_uri, features_step(UNLABELLED)).statistics["moments"]
    torch.manual_seed(8)
    model = make_model(BIDIRECTIONAL, TREE.num_senones)
    put_model(store, run_uri, LABELS, model, counts, moments)
    return store, run_uri, corpus_uri


@pytest.fixture
def generate(
    place: tuple[ObjectStore, str, str], run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> RunOne:
    """Return a function that runs the job in this process; its tasks and servers are in it too."""
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    monkeypatch.setattr(RequestStream, "answers", answers_here)
    _, run_uri, corpus_uri = place

    def run(*overrides: str) -> dict[str, Any]:
        settings = (f'corpus.uri="{corpus_uri}"', *LATTICE, *overrides)
        more = [part for each in settings for part in ("--set", each)]
        said = run_job("generate_targets", "--recipe", str(TINY), "--run", run_uri, *more, "--json")
        assert said.code == 0, said.err
        return dict(json.loads(said.out))

    return run


def made(run_uri: str) -> list[str]:
    """Return the digests of the targets, and remove all that the job made."""
    manifest = json.loads(Path(run_uri, "targets/unlabelled/manifest.json").read_text())
    for folder in ("targets", TARGETS_TUNING_STEP):
        shutil.rmtree(Path(run_uri, folder), ignore_errors=True)  # a recipe may state the settings
    return [each["sha256"] for each in manifest["outputs"]]


def test_the_tuned_search_of_the_sequence_trained_teacher_labels(
    place: tuple[ObjectStore, str, str], generate: RunOne
) -> None:
    """The targets are those of a recipe that states the choice, and no graph is built for them."""
    store, run_uri, corpus_uri = place
    evaluation = read_recipe(str(TINY), list(LATTICE)).evaluation
    build_graphs(store, run_uri, corpus_uri, evaluation, (1, 2))
    said = generate()
    assert list(said["manifests"]) == ["targets/unlabelled"]
    untuned = made(run_uri)
    write_transcribed(store, run_uri, DEV)
    said = generate()
    steps = [TARGETS_TUNING_STEP, "targets/unlabelled"]
    assert list(said["manifests"]) == steps
    tuning, targets = (read_manifest(store, run_uri, each) for each in steps)
    chosen = {"acoustic_scale": 0.1, "ngram_order": 1}
    chosen |= {"language_model_scale": 1.0, "insertion_penalty": 0.0}
    assert tuning.statistics["settings"] == {LABELS: chosen}
    assert {model_step(LABELS), features_step(DEV), GRAPH_STEP} < tuning.inputs.keys()
    assert {model_step(LABELS), GRAPH_STEP, TARGETS_TUNING_STEP} < targets.inputs.keys()
    tuned = made(run_uri)
    said = generate(STATED)
    assert list(said["manifests"]) == steps[1:]
    assert made(run_uri) == tuned != untuned
