"""The job labels by what recognizers heard, at thresholds of development speakers if it can."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from infra.devices.device_client import RequestStream
from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import GRAPH_STEP, TARGETS_TUNING_STEP, TEACHER, features_step, model_step
from tests.in_process_teacher import answers_here
from tests.job_programs import RunJob
from tests.small_corpus import plain_loop
from tests.training.sequence_training.toy_run import finish
from tests.training.targets.test_transcript_targets import heard_rows, truth
from tests.training.targets.test_transcript_tuning import write_dev
from tests.training.targets.unlabelled_toy_run import (
    BIDIRECTIONAL,
    SHARDS,
    write_unlabelled_toy_run,
)
from tests.whole_path.processes import TINY
from training.evaluate.graph_building import build_graphs
from training.settings.decoding import EvaluationConfig
from training.settings.recipe import read_recipe

SETTINGS = (
    "targets.source='transcripts'",
    f"models.teacher.num_units={BIDIRECTIONAL.num_units}",
    "evaluation.acoustic_scale=0.5",
)


@pytest.fixture
def place(tmp_path: Path) -> tuple[ObjectStore, str, str]:
    """A run with a teacher, in whose unlabelled speech a recognizer heard the true words."""
    shards = [heard_rows(shard, truth) for shard in range(len(SHARDS))]
    return write_unlabelled_toy_run(tmp_path, shards)


@pytest.fixture
def generate(
    place: tuple[ObjectStore, str, str], run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Return a function that runs the job in this process; its tasks and servers are in it too."""
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    monkeypatch.setattr(RequestStream, "answers", answers_here)
    _, run_uri, corpus_uri = place

    def run(*overrides: str) -> Any:
        settings = (f'corpus.uri="{corpus_uri}"', *SETTINGS, *overrides)
        more = [part for each in settings for part in ("--set", each)]
        return run_job("generate_targets", "--recipe", str(TINY), "--run", run_uri, *more, "--json")

    return run


def made(run_uri: str, folders: tuple[str, ...] = ("targets", "graphs")) -> dict[str, Any]:
    """Return the manifest of the targets, and remove all that the job made."""
    manifest: dict[str, Any] = json.loads(
        Path(run_uri, "targets/unlabelled/manifest.json").read_text()
    )
    for folder in folders:
        shutil.rmtree(Path(run_uri, folder), ignore_errors=True)
    return manifest


def test_transcripts_label_and_development_speakers_choose(
    place: tuple[ObjectStore, str, str], generate: Callable[..., Any]
) -> None:
    """The same targets as of a recipe that states the choice; the lexicon is an input.

    A recipe that does not tune reads past a choice that was made before.
    """
    store, run_uri, _ = place
    said = generate()
    assert said.code == 0, said.err
    untuned = made(run_uri)
    assert list(json.loads(said.out)["manifests"]) == ["targets/unlabelled"]
    assert {"lexicon.txt", model_step(TEACHER)} < untuned["inputs"].keys()
    assert 0 < untuned["statistics"]["mean_transcript_share"] <= 0.9
    rows = [
        replace(row, text=row.hypotheses[0].text.lower().strip("."), utterance_id=f"dev-{n}")
        for n, row in enumerate(heard_rows(0, truth))
    ]
    write_dev(store, run_uri, rows)
    said = generate()
    assert said.code == 0, said.err
    assert list(json.loads(said.out)["manifests"]) == [TARGETS_TUNING_STEP, "targets/unlabelled"]
    chosen = read_manifest(store, run_uri, TARGETS_TUNING_STEP).statistics["settings"]
    tuned = made(run_uri, ("targets",))
    assert TARGETS_TUNING_STEP in tuned["inputs"]
    assert generate("targets.transcripts.tuned=false").code == 0
    assert made(run_uri)["outputs"] == untuned["outputs"] != tuned["outputs"]
    stated = [f"targets.transcripts.{name}={value}" for name, value in chosen.items()]
    said = generate(*stated, "targets.transcripts.tuned=false")
    assert said.code == 0, said.err
    assert list(json.loads(said.out)["manifests"]) == ["targets/unlabelled"]
    again = made(run_uri)
    assert [each["sha256"] for each in again["outputs"]] == [
        each["sha256"] for each in tuned["outputs"]
    ]


def test_the_runs_own_lattices_weigh_transcripts(
    place: tuple[ObjectStore, str, str], generate: Callable[..., Any]
) -> None:
    """The graph is an input then, as are the settings of its search; right words weigh less."""
    _, run_uri, _ = place
    said = generate()
    assert said.code == 0, said.err
    alone = made(run_uri)
    evaluation = EvaluationConfig(ngram_order=2, acoustic_scale=0.5, beam=13.0, max_active=100)
    build_graphs(*place, evaluation, (read_recipe(str(TINY)).evaluation.ngram_order,))
    said = generate("targets.transcripts.lattice_agreement=1.0")
    assert said.code == 0, said.err
    weighed = made(run_uri)
    assert weighed["inputs"].keys() - alone["inputs"].keys() == {GRAPH_STEP}
    assert "ngram_order" in weighed["config"]["evaluation"]
    shares = [each["statistics"]["mean_transcript_share"] for each in (weighed, alone)]
    assert 0 < shares[0] < shares[1]


def test_a_run_without_transcripts_is_refused(
    place: tuple[ObjectStore, str, str], generate: Callable[..., Any]
) -> None:
    """Before any teacher starts; so is a language without numbers."""
    store, run_uri, _ = place
    said = generate("targets.transcripts.language='xx'")
    assert said.code == 2
    assert "targets.transcripts.language = 'xx': need one of num2words" in said.err
    step = features_step("unlabelled")
    found = read_manifest(store, run_uri, step)
    Path(run_uri, step, "manifest.json").unlink()
    moments = {"moments": found.statistics["moments"]}
    finish(store, run_uri, step, found.tally_out, found.outputs, **moments)
    said = generate()
    assert said.code == 2
    assert "no utterance of features/unlabelled has what a recognizer heard" in said.err
