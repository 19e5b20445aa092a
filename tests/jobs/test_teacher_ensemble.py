"""An ensemble of teachers: a model a seed, each a step of its own, known to every job."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.retry import later_steps
from jobs.run_table import TRAIN_TEACHER, step_configs, written_steps
from pipeline.runs.names import (
    LABELLED,
    TEACHER,
    evaluated_models,
    features_step,
    labelling_models,
    lattices_step,
    model_step,
    section_of,
    teachers,
)
from tests.job_programs import RunJob
from tests.training.sequence_training.toy_run import write_toy_run
from tests.whole_path.processes import TINY
from training.fit.model_specs import teacher_fit, teacher_fits
from training.settings.recipe import read_recipe

ENSEMBLE = ("--set", "teacher.ensemble=2")
SMBR = (
    *("--set", "sequence_training.teacher=true"),
    *("--set", "sequence_training.num_epochs=1"),
    *("--set", "sequence_training.lattices.ngram_order=1"),
    *("--set", "loss_budget=0.2"),
)
ONE = model_step(TEACHER)
TWO = (ONE, model_step("teacher_2"))
ALL = (
    *(ONE, lattices_step(TEACHER), model_step("teacher_smbr")),
    *(TWO[1], lattices_step("teacher_2"), model_step("teacher_2_smbr")),
)


@pytest.fixture
def options(tmp_path: Path) -> tuple[str, ...]:
    """A run that is aligned, without a model; the arguments that name it."""
    _, run_uri, corpus_uri = write_toy_run(tmp_path)
    shutil.rmtree(Path(run_uri) / "models")
    return ("--recipe", str(TINY), "--run", run_uri, "--set", f'corpus.uri="{corpus_uri}"')


def test_a_single_teacher_grows_to_an_ensemble(options: tuple[str, ...], run_job: RunJob) -> None:
    """The first one is that of a run without an ensemble, to the byte; the next has another seed.

    Sequence training trains each on, on lattices of its own.
    """
    single = json.loads(run_job("train_teacher", *options, "--json").out)
    assert tuple(single["manifests"]) == (ONE,)
    first = (Path(options[3]) / ONE / "manifest.json").read_bytes()
    more = (*options, *ENSEMBLE, *SMBR)
    listed = json.loads(run_job("train_teacher", *more, "--dry-run", "--json").out)
    assert listed["writes"] == {ONE: "there"} | dict.fromkeys(ALL[1:], "missing")
    done = run_job("train_teacher", *more, "--json")
    assert done.code == 0, done.err
    assert tuple(json.loads(done.out)["manifests"]) == ALL
    assert (Path(options[3]) / ONE / "manifest.json").read_bytes() == first
    manifests = [json.loads((Path(options[3]) / s / "manifest.json").read_text()) for s in ALL]
    configs = [each["config"] for each in manifests]
    seeds = [each["training"]["seed"] for each in configs if "training" in each]
    assert seeds == [5, 17, 6, 17]
    assert configs[5]["warm_start"] == "teacher_2"
    outputs = [each["outputs"][0]["sha256"] for each in manifests]
    assert len(set(outputs)) == len(ALL)
    again = json.loads(run_job("train_teacher", *more, "--json").out)
    assert again["status"] == "nothing to do"
    killed = Path(options[3]) / TWO[1] / "manifest.json"
    stored = killed.read_bytes()
    killed.unlink()
    resumed = json.loads(run_job("train_teacher", *more, "--json").out)
    assert (resumed["status"], killed.read_bytes()) == ("done", stored)


@pytest.mark.parametrize("job", ["generate_targets", "evaluate"])
def test_a_dry_run_lists_the_models_that_a_job_reads(
    options: tuple[str, ...], run_job: RunJob, job: str
) -> None:
    """Those that label are trained on before; all of them are scored."""
    said = json.loads(run_job(job, *options, *ENSEMBLE, *SMBR, "--dry-run", "--json").out)
    found = {name for name in said["reads"] if name.startswith("models/")}
    models = labelling_models if job == "generate_targets" else evaluated_models
    assert found == set(map(model_step, models([TEACHER], 2)))
    assert set(json.loads(run_job(job, *options, "--dry-run", "--json").out)["reads"]) >= {ONE}


def test_a_teacher_of_an_ensemble_is_a_single_one_of_its_seed() -> None:
    """But for the name: today's fingerprints remain, and each member can be made alone."""
    plain, recipe = (read_recipe(str(TINY), each) for each in ([], ["teacher.ensemble=3"]))
    fits = teacher_fits(recipe)
    assert [fit.name for fit in fits] == ["teacher", "teacher_2", "teacher_3"]
    assert fits[0].config == teacher_fit(plain).config
    for number, fit in enumerate(fits):
        seed = plain.teacher.seed + number
        alone = teacher_fit(read_recipe(str(TINY), [f"teacher.seed={seed}"]))
        assert fit.config == replace(alone, name=fit.name).config
    last = read_recipe(str(TINY), [f"teacher.seed={2**64 - 1}", "teacher.ensemble=2"])
    assert [fit.training.seed for fit in teacher_fits(last)] == [2**64 - 1, 0]


def test_jobs_know_the_models_of_an_ensemble() -> None:
    """All members are scored, and the last form of each labels: by sMBR where it is trained on."""
    assert teachers(1) == labelling_models((), 1) == (TEACHER,)
    assert labelling_models(["student"], 2) == ("teacher", "teacher_2")
    assert labelling_models([TEACHER], 2) == ("teacher_smbr", "teacher_2_smbr")
    scored = ("baseline", "teacher", "teacher_2", "student")
    assert evaluated_models((), 2) == scored
    assert evaluated_models([TEACHER], 2) == (*scored, "teacher_smbr", "teacher_2_smbr")
    two = ["teacher.ensemble=2"]
    assert written_steps(read_recipe(str(TINY), two), TRAIN_TEACHER) == TWO
    both = read_recipe(str(TINY), [*two, "sequence_training.teacher=true"])
    assert written_steps(both, TRAIN_TEACHER) == ALL
    for name in evaluated_models([TEACHER], 3):
        assert section_of(name) in scored


def test_verify_and_retry_know_them() -> None:
    """Settings of each are compared with the recipe; what is made from lost rows is removed."""
    recipe = read_recipe(str(TINY), ["teacher.ensemble=2", "sequence_training.teacher=true"])
    assert set(ALL) <= step_configs(recipe, recipe).keys()
    assert set(ALL) <= set(later_steps(recipe, [features_step(LABELLED)]))
    single = read_recipe(str(TINY), ["sequence_training.teacher=true"])
    assert not set(ALL[3:]) & set(later_steps(single, [features_step(LABELLED)]))
