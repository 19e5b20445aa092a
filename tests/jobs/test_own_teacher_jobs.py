"""The jobs of a run whose first targets are a user's own teacher's: lattices, rounds, retry."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from infra.cluster import load_cluster
from infra.devices.device_client import RequestStream
from jobs import evaluate
from jobs.cli import spark_steps
from jobs.cli.job import open_job
from jobs.generate_targets import STEP, search_of, tune_search
from jobs.planning.run_plan import plan_run, planned_workload
from jobs.retry import later_steps
from jobs.run_table import EVALUATE, step_configs, written_steps
from pipeline.records import Tally
from pipeline.runs.names import (
    DEV,
    GRAPH_STEP,
    TEACHER,
    UNLABELLED,
    evaluated_models,
    features_step,
    labelling_models,
    model_step,
    teachers,
)
from tests.in_process_teacher import answers_here
from tests.job_programs import RunJob
from tests.jobs.planning.test_throughputs import CALIBRATION
from tests.small_corpus import plain_loop, serially
from tests.training.sequence_training.toy_run import finish
from tests.training.targets.unlabelled_toy_run import write_unlabelled_toy_run
from tests.whole_path.processes import TINY
from training.settings.recipe import read_recipe

OWN = "targets.teacher.factory='tests.training.targets.own_teachers:spliced'"
SIBLING = model_step("teacher_round_2")

RunOne = Callable[..., dict[str, Any]]


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    """The arguments that name a run without a teacher, aligned and extracted."""
    _, run_uri, corpus_uri = write_unlabelled_toy_run(tmp_path)
    shutil.rmtree(Path(run_uri) / "models")
    corpus = f'corpus.uri="{corpus_uri}"'
    return ("--recipe", str(TINY), "--run", run_uri, "--set", corpus, "--set", OWN)


@pytest.fixture
def run_one(options: tuple[str, ...], run_job: RunJob, monkeypatch: pytest.MonkeyPatch) -> RunOne:
    """Return a function that runs a job; its tasks and servers are in this process, too.

    tests/whole_path/test_own_teacher_run.py has a real server of such a teacher.
    """
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    monkeypatch.setattr(RequestStream, "answers", answers_here)

    def run(name: str, *overrides: str) -> dict[str, Any]:
        more = [part for each in overrides for part in ("--set", each)]
        said = run_job(name, *options, *more, "--json")
        assert said.code == 0, said.err
        return json.loads(said.out)

    return run


def outputs(run_uri: str, step: str) -> list[str]:
    manifest = json.loads(Path(run_uri, step, "manifest.json").read_text())
    return [each["sha256"] for each in manifest["outputs"]]


def test_lattices_of_its_logits_are_targets(options: tuple[str, ...], run_one: RunOne) -> None:
    """With no weight they are its targets by logits, to the byte; with one they are others."""
    run_uri, targets = options[3], "targets/unlabelled"
    run_one("build_graph", "targets.lattices.ngram_order=1")
    found = {}
    for source, weight in (("logits", 0.0), ("lattice", 0.0), ("lattice", 0.5)):
        lattices = f"targets.lattices={{weight = {weight}, acoustic_scale = 0.5, ngram_order = 1}}"
        said = run_one("generate_targets", f"targets.source='{source}'", lattices)
        assert said["manifests"][targets]["quarantined"] == 0
        found[source, weight] = outputs(run_uri, targets)
        shutil.rmtree(Path(run_uri, targets))
    assert found["logits", 0.0] == found["lattice", 0.0] != found["lattice", 0.5]


def test_its_search_is_not_tuned(options: tuple[str, ...]) -> None:
    """Tuning decodes by models of the run: development speakers change nothing."""
    arguments = STEP.parser().parse_args([*options, "--set", "targets.source='lattice'"])
    job = open_job(STEP.name, arguments)
    finish(job.store, job.run_uri, features_step(DEV), Tally(), ())
    assert tune_search(job, serially) == []
    assert search_of(job).reads == (GRAPH_STEP,)


def test_in_a_second_round_a_sibling_labels(options: tuple[str, ...], run_one: RunOne) -> None:
    """It is the only teacher that the run trains, on targets of the user's own teacher."""
    run_uri = options[3]
    rounds = ("targets.rounds=2", "partitions.partition_hours=0.0003")
    assert run_one("train_teacher", *rounds)["manifests"] == {}
    for name in ("generate_targets", "repartition", "train_teacher", "generate_targets"):
        said = run_one(name, *rounds)
    assert list(said["manifests"]) == ["targets/round_1", "targets/unlabelled"]
    assert [each.name for each in Path(run_uri, "models").iterdir()] == [Path(SIBLING).name]
    first, last = (Path(run_uri, f"targets/{each}") for each in ("round_1", "unlabelled"))
    reads = [json.loads((each / "manifest.json").read_text())["inputs"] for each in (first, last)]
    assert [set(each) - {features_step(UNLABELLED)} for each in reads] == [
        {"alignments/labelled"},
        {SIBLING},
    ]
    assert outputs(run_uri, "targets/round_1") != outputs(run_uri, "targets/unlabelled")


def test_jobs_name_no_model_of_it() -> None:
    """None is written, scored, verified or planned; what reads the tree is made from it."""
    assert teachers(0) == labelling_models((), 0) == ()
    assert evaluated_models((), 0) == ("baseline", "student")
    recipe = read_recipe(str(TINY), [OWN])
    assert written_steps(recipe, "train_teacher") == ()
    assert not [name for name in step_configs(recipe, recipe) if TEACHER in name]
    later = later_steps(recipe, ["alignments/labelled"])
    assert "targets/unlabelled" in later
    assert model_step(TEACHER) not in later


def test_costs_of_k_are_those_of_who_labelled_last(options: tuple[str, ...]) -> None:
    """The user's own teacher, of the tree's senones; in a second round the sibling."""
    for rounds, reads in ((1, ["alignments/labelled"]), (2, [SIBLING])):
        given = [*options, "--set", f"targets.rounds={rounds}"]
        job = open_job(EVALUATE, evaluate.STEP.parser().parse_args(given))
        teachers = evaluate.labelling(job)
        assert list(teachers.reads) == reads
        assert bool(teachers.failures) == (rounds == 1)


def test_a_plan_has_no_training_of_it() -> None:
    """Its labelling takes the time of the recipe's teacher, for each of an ensemble."""
    workload = planned_workload(10.0, 100.0, 10.0)
    ensemble = "targets.teacher.ensemble=[{factory = 'my_teachers:other'}]"
    seconds = {}
    for name, overrides in {"trained": [], "own": [OWN], "two": [OWN, ensemble]}.items():
        recipe = read_recipe(str(TINY), overrides)
        plan = plan_run(workload, recipe, CALIBRATION, lambda _: load_cluster("demo"))
        seconds[name] = {each.step: each.wall_seconds for each in plan.steps}
    assert seconds["trained"].keys() - seconds["own"].keys() == {"train_teacher"}
    labelling = {name: each["generate_targets"] for name, each in seconds.items()}
    assert labelling["trained"] == labelling["own"] < labelling["two"]
