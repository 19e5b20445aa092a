"""Rounds of targets: the student's bidirectional sibling labels again, each job as it is due."""

import json
from dataclasses import replace
from pathlib import Path

from infra.settings import canonical_json
from infra.store.object_store import ObjectStore
from jobs.cli.job import open_job, read_recipe
from jobs.generate_targets import STEP as GENERATE
from jobs.generate_targets import due_rounds
from jobs.retry import later_steps
from jobs.run import launches
from jobs.run_table import GENERATE_TARGETS, REPARTITION, TRAIN_TEACHER, step_configs, written_steps
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.names import (
    DEV,
    STUDENT,
    TARGETS_TUNING_STEP,
    TEACHER,
    UNLABELLED,
    TargetsRound,
    evaluated_models,
    features_step,
    labelling_models,
    model_step,
    sequence_trained,
    targets_rounds,
)
from pipeline.settings import RepartitionConfig, TargetsConfig
from pipeline.steps.repartition import repartition
from pipeline.steps.targets import generate_targets
from tests.in_process_teacher import in_process
from tests.job_programs import RunJob
from tests.small_corpus import serially
from tests.training.targets.unlabelled_toy_run import write_unlabelled_toy_run
from tests.whole_path.processes import TINY
from training.fit.model_specs import sibling_fit, sibling_fits, student_fit, teacher_fit
from training.targets.teacher import serve_teacher

FIRST, LAST = targets_rounds(2)
ROUNDS = ("--set", "targets.rounds=2", "--set", "student.num_passes=1")
SIBLING = "teacher_round_2"


def make(store: ObjectStore, run_uri: str, targets_round: TargetsRound, model: str) -> Manifest:
    """Label and repartition in one round, by the server's function in this process."""
    form = canonical_json(read_recipe(str(TINY)).models.of(model))
    teacher = in_process(serve_teacher("cpu", run_uri, "6", form, model), 6)
    config = TargetsConfig(6, 60, 3)
    made = generate_targets(
        *(store, run_uri, config, teacher, serially, [model]), targets_round=targets_round
    )
    parts = RepartitionConfig(1 / 3600, 2, 3)
    repartition(store, run_uri, parts, serially, targets_round)
    return made.manifest


def test_a_second_round_is_labelled_by_a_model_of_the_first_ones_targets(
    tmp_path: Path, run_job: RunJob
) -> None:
    """Each job does the rounds that are due: the first, then, given again, the next one."""
    store, run_uri, corpus_uri = write_unlabelled_toy_run(tmp_path)
    Path(run_uri, model_step(TEACHER), "manifest.json").unlink()
    options = ("--recipe", str(TINY), "--run", run_uri, "--set", f'corpus.uri="{corpus_uri}"')
    more = (*options, *ROUNDS, "--json")

    def due() -> list[TargetsRound]:
        arguments = GENERATE.parser().parse_args([*options, *ROUNDS])
        return [each for each, _ in due_rounds(open_job(GENERATE.name, arguments))]

    def trained() -> tuple[list[str], str]:
        done = run_job(TRAIN_TEACHER, *more)
        assert done.code == 0, done.err
        answer = json.loads(done.out)
        return list(answer["manifests"]), answer["status"]

    both = [model_step(TEACHER), model_step(SIBLING)]
    listed = json.loads(run_job(TRAIN_TEACHER, *more, "--dry-run").out)
    assert listed["writes"] == dict.fromkeys(both, "missing")
    assert trained() == (both[:1], "done")
    assert trained() == (both[:1], "nothing to do")
    assert due() == [FIRST]
    first = make(store, run_uri, FIRST, TEACHER)
    assert due() == [FIRST]
    assert trained() == (both, "done")
    assert due() == [FIRST, LAST]
    assert trained() == (both, "nothing to do")
    last = make(store, run_uri, LAST, SIBLING)
    assert (first.step, last.step) == ("targets/round_1", "targets/unlabelled")
    assert model_step(SIBLING) in last.inputs
    assert first.tally_out == last.tally_out == last.tally_in
    assert [each.sha256 for each in first.outputs] != [each.sha256 for each in last.outputs]
    sibling = read_manifest(store, run_uri, model_step(SIBLING))
    assert "partitions/round_1" in sibling.inputs
    assert sibling.config["model"]["bidirectional"]
    # The student's targets are those of the last round.
    partitions = read_manifest(store, run_uri, "partitions/unlabelled")
    assert set(partitions.inputs) == {features_step(UNLABELLED), "targets/unlabelled"}
    record = json.loads(Path(run_uri, "steps", f"{TRAIN_TEACHER}.json").read_text())
    named = {each["key"] for each in record["objects"]}
    assert {f"{step}/manifest.json" for step in both} <= named


def test_the_sibling_learns_as_the_student_does() -> None:
    """Its form and trainer are the teacher's; sub-epochs, rates and data are the student's."""
    recipe = read_recipe(str(TINY), ["targets.rounds=2"])
    student, sibling = student_fit(recipe), sibling_fit(recipe, FIRST)
    assert sibling == replace(
        student,
        name=SIBLING,
        model=recipe.models.teacher,
        unlabelled="partitions/round_1",
        training=replace(student.training, trainer=recipe.teacher.trainer),
    )
    assert sibling.unlabelled != student.unlabelled
    assert sibling.model == teacher_fit(recipe).model != student.model


def test_an_ensemble_labels_each_round() -> None:
    """A later round has as many siblings, of the student's seed and the next ones; else alike."""
    several = ["targets.rounds=3", "teacher.ensemble=2", f"student.seed={2**64 - 1}"]
    recipe = read_recipe(str(TINY), several)
    fits = sibling_fits(recipe)
    assert [(fit.name, fit.training.seed, fit.unlabelled) for fit in fits] == [
        (SIBLING, 2**64 - 1, "partitions/round_1"),
        (f"{SIBLING}_2", 0, "partitions/round_1"),
        ("teacher_round_3", 2**64 - 1, "partitions/round_2"),
        ("teacher_round_3_2", 0, "partitions/round_2"),
    ]
    one, two = fits[:2]
    assert two == replace(one, name=two.name, training=replace(one.training, seed=0))
    single = read_recipe(str(TINY), [each for each in several if "ensemble" not in each])
    assert [fit.config for fit in sibling_fits(single)] == [fits[0].config, fits[2].config]
    models = [labelling_models([TEACHER], 2, each) for each in (FIRST, LAST)]
    assert models == [("teacher_smbr", "teacher_2_smbr"), (f"{SIBLING}_smbr", f"{SIBLING}_2_smbr")]
    siblings = {fit.name for fit in fits}
    assert siblings < set(evaluated_models((), 2, 3))
    assert set(map(model_step, siblings)) < step_configs(recipe, recipe).keys()
    two = read_recipe(str(TINY), ["targets.rounds=2", "teacher.ensemble=2"])
    assert written_steps(two, TRAIN_TEACHER)[2:] == (
        *(model_step(SIBLING), model_step(f"{SIBLING}_2")),
    )
    own = read_recipe(str(TINY), ["targets.rounds=2", "targets.teacher.factory='mine:teacher'"])
    assert [fit.name for fit in sibling_fits(own)] == [SIBLING]
    assert labelling_models((), own.num_teachers, LAST) == (SIBLING,)


def test_a_round_is_due_once_all_its_teachers_are_trained(tmp_path: Path, run_job: RunJob) -> None:
    """A sibling alone of two labels nothing; both do, and each learnt from the round before."""
    store, run_uri, corpus_uri = write_unlabelled_toy_run(tmp_path)
    options = ("--recipe", str(TINY), "--run", run_uri, "--set", f'corpus.uri="{corpus_uri}"')
    several = (*options, *ROUNDS, "--set", "teacher.ensemble=2")
    Path(run_uri, model_step(TEACHER), "manifest.json").unlink()
    assert run_job(TRAIN_TEACHER, *options, *ROUNDS).code == 0
    make(store, run_uri, FIRST, TEACHER)
    assert run_job(TRAIN_TEACHER, *options, *ROUNDS).code == 0

    def due() -> dict[int, tuple[str, ...]]:
        job = open_job(GENERATE.name, GENERATE.parser().parse_args([*several]))
        return {each.number: tuple(models) for each, models in due_rounds(job)}

    assert due() == {1: (TEACHER, "teacher_2")}
    trained = run_job(TRAIN_TEACHER, *several, "--json")
    assert trained.code == 0, trained.err
    assert due()[2] == (SIBLING, f"{SIBLING}_2")
    outputs = [
        read_manifest(store, run_uri, model_step(name)).outputs[0].sha256 for name in due()[2]
    ]
    assert len(set(outputs)) == 2


def test_jobs_know_the_rounds() -> None:
    """They know its steps when they write, score, verify and remove; one round is as it was."""
    rounds = {n: read_recipe(str(TINY), [f"targets.rounds={n}"]) for n in (1, 2, 3)}
    assert written_steps(rounds[3], GENERATE_TARGETS) == (
        *("targets/round_1", "targets/round_2", "targets/unlabelled"),
    )
    assert written_steps(rounds[2], REPARTITION) == (
        *("partitions/round_1", "partitions/unlabelled"),
    )
    recipe = read_recipe(str(TINY), ["targets.rounds=2", "sequence_training.teacher=true"])
    made = written_steps(recipe, TRAIN_TEACHER)
    sibling = (model_step(SIBLING), f"lattices/{SIBLING}", model_step(sequence_trained(SIBLING)))
    assert made[3:] == sibling
    early = {"targets/round_1", "partitions/round_1", *sibling}
    assert early <= step_configs(recipe, recipe).keys()
    assert early <= set(later_steps(recipe, [features_step(UNLABELLED)]))
    assert not early & set(later_steps(rounds[1], [features_step(UNLABELLED)]))
    lattices = read_recipe(str(TINY), ["targets.source='lattice'"])
    tuned = later_steps(lattices, [features_step(DEV)])
    assert {TARGETS_TUNING_STEP, "targets/unlabelled"} <= {*tuned}
    assert "targets/unlabelled" not in later_steps(rounds[1], [features_step(DEV)])
    assert evaluated_models((), 1, 2) == ("baseline", TEACHER, SIBLING, STUDENT)


def test_a_run_repeats_the_jobs_of_a_round() -> None:
    """Teacher, targets and partitions twice; recipes of one round start as many jobs as before."""
    one, two = (
        [each.step for each in launches(["--kaldi-dir", "data"], 2, 2, num_target_rounds=n)]
        for n in (1, 2)
    )
    again = [TRAIN_TEACHER, GENERATE_TARGETS, REPARTITION]
    place = one.index(REPARTITION) + 1
    assert two == [*one[:place], *again, *one[place:]]
