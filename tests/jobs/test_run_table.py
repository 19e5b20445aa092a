"""A new step is one row of the run table: each command that concerns steps then knows it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from infra.cluster import Cluster, load_cluster
from infra.settings import ConfigurationError
from infra.store.object_store import ObjectStore, join_uri
from jobs import check, request_cluster
from jobs.cli import megahour
from jobs.planning.run_plan import plan_run, planned_workload
from jobs.retry import later_steps
from jobs.roles import template
from jobs.run import JOBS, launches
from jobs.run_table import (
    EXTRACT_FEATURES,
    GENERATE_TARGETS,
    STEPS,
    Step,
    Written,
    spark_steps,
    utterance_reads,
    written,
)
from jobs.volumes import X_REAL_TIME
from pipeline.records import Tally
from pipeline.runs.commit import Commit, step_context
from pipeline.runs.engine import write_manifest
from pipeline.runs.manifest import (
    Manifest,
    manifest_uri,
    read_manifest,
    read_output,
    read_with_digest,
)
from pipeline.runs.names import (
    BOOTSTRAP_STEP,
    DEV,
    features_step,
    job_record,
    start_record,
    task_name,
)
from pipeline.runs.sealed_json import seal
from tests.job_programs import RunJob
from tests.jobs.planning.test_throughputs import CALIBRATION
from tests.small_run import SETTINGS, make_run, selected_ids, spoilt
from tests.whole_path.processes import TINY
from training.settings.recipe import Recipe, read_recipe

NAME, MADE, FEATURES = "enhance_features", "enhanced/unlabelled", "features/unlabelled"
SETTINGS_OF_STEP = {"strength": 0.5}
SUMMARY = "Enhance the unlabelled features."


def writes(_: Recipe) -> Sequence[Written]:
    return [Written(MADE, (FEATURES,), SETTINGS_OF_STEP, hours_of=FEATURES)]


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Step]:
    """Put a step between features and targets, and its file among those of jobs/."""
    step = Step(NAME, "Spark", writes)
    before = dict(STEPS)
    STEPS.clear()
    for name, each in before.items():
        STEPS[name] = each
        if name == EXTRACT_FEATURES:
            STEPS[NAME] = step
    folder = tmp_path / "jobs"
    folder.mkdir()
    for path in JOBS.glob("*.py"):
        (folder / path.name).symlink_to(path)
    (folder / f"{NAME}.py").write_text(f'"""{SUMMARY}\n\nmegahour {NAME}\n"""\n')
    monkeypatch.setattr(megahour, "files", lambda _: folder)
    yield step
    STEPS.clear()
    STEPS.update(before)


@pytest.fixture
def run(tmp_path: Path) -> tuple[ObjectStore, str]:
    """A run in which the step has enhanced the features of each shard, by a task each."""
    store, run_uri = make_run(tmp_path)
    extracted, digest = read_with_digest(store, run_uri, FEATURES)
    context = step_context(store, run_uri, MADE, SETTINGS_OF_STEP, {FEATURES: digest})
    outputs = []
    for number, output in enumerate(extracted.outputs):
        data, task = read_output(store, run_uri, output), task_name(number)
        outputs.append(context.put_output(task, ".parquet", data, output.tally))
        record = Commit(task, context.fingerprint, (outputs[-1],), None, output.tally, Tally())
        context.commit(record)
    tally, inputs = extracted.tally_out, {FEATURES: digest}
    stored = Manifest(MADE, SETTINGS_OF_STEP, inputs, tuple(outputs), (), tally, tally)
    write_manifest(context, replace(stored, versions=context.versions))
    return store, run_uri


def arguments_of(run_uri: str) -> list[str]:
    return ["--recipe", str(TINY), "--run", run_uri, *(p for s in SETTINGS for p in ("--set", s))]


def test_the_list_and_the_run_have_it() -> None:
    """Between features and targets, with its starter and its summary."""
    assert f"  {NAME:<18} {'Spark':<9} {SUMMARY}" in megahour.listing().splitlines()
    names = [launch.step for launch in launches(["--kaldi-dir", "data"], 2, 4)]
    assert names.index(EXTRACT_FEATURES) < names.index(NAME) < names.index(GENERATE_TARGETS)


def test_the_check_opens_it(tmp_path: Path) -> None:
    """Its manifest must lie within what its cluster file may write."""
    run_uri = str(tmp_path / "run")
    options = ["--recipe", str(TINY), "--run", run_uri, "--step-cluster", f"{NAME}=bootstrap"]
    with pytest.raises(
        ConfigurationError, match=f"{NAME}: write_prefixes .* lack {run_uri}/{MADE}"
    ):
        check.check(check._parser().parse_args(options))


def test_the_status_shows_its_hours(run_job: RunJob, run: tuple[ObjectStore, str]) -> None:
    """Done, with its hours; under way, with the hours of the features that it reads."""
    store, run_uri = run
    done = json.loads(run_job("status", *arguments_of(run_uri), "--json").out)["steps"][NAME][MADE]
    assert (done["state"], done["hours_in"] > 0) == ("done", True)
    store.delete(manifest_uri(run_uri, MADE))
    began = datetime.now(UTC).isoformat()
    note = {"step": NAME, "started_at": began, "hours_before": {}, "recipe": {}}
    store.put(join_uri(run_uri, start_record(NAME)), seal(note))
    now = json.loads(run_job("status", *arguments_of(run_uri), "--json").out)["steps"][NAME][MADE]
    assert (now["state"], now["hours_done"]) == ("under way", done["hours_done"])
    assert now["hours_in"] == done["hours_in"]


def test_an_utterance_is_traced_through_it(run_job: RunJob, run: tuple[ObjectStore, str]) -> None:
    """In the shard that its task made of the utterance's features."""
    store, run_uri = run
    chosen = min({*selected_ids(store, run_uri)} - {spoilt(store, run_uri)})
    said = run_job("inspect_object", *arguments_of(run_uri), chosen, "--json")
    steps = {each["step"]: each for each in json.loads(said.out)["steps"]}
    assert steps[MADE]["outcome"] == "written"
    assert steps[MADE]["position"] == steps[FEATURES]["position"]


def test_verify_reads_it(run_job: RunJob, run: tuple[ObjectStore, str]) -> None:
    """Its objects, commits and utterances; its settings by the recipe; its job's record."""
    store, run_uri = run
    said = run_job("verify", *arguments_of(run_uri), "--json")
    found = json.loads(said.out)
    assert (said.code, found["findings"]) == (0, [])
    assert MADE in found["steps"]
    store.put(join_uri(run_uri, job_record("repartition")), b"{}")
    whole = read_manifest(store, run_uri, MADE)
    lost, *rest = whole.outputs
    for key in (f"{MADE}/manifest.json", f"{MADE}/commits/000000.json"):
        store.delete(join_uri(run_uri, key))
    tally = sum((output.tally for output in rest), Tally())
    damaged = replace(
        whole, outputs=tuple(rest), tally_in=tally, tally_out=tally, config={"strength": 1}
    )
    store.put(manifest_uri(run_uri, MADE), damaged.to_bytes())
    findings = json.loads(run_job("verify", *arguments_of(run_uri), "--json").out)["findings"]
    assert job_record(NAME) in {each["object"] for each in findings}
    of_step = [each for each in findings if each["object"] == f"{MADE}/manifest.json"]
    assert any(f"{lost.utterances:,} lost: " in each["found"] for each in of_step)
    assert any(each["expected"] == "the recipe's settings" for each in of_step)


def test_a_plan_has_its_hours() -> None:
    """A task a feature shard, in the hours that its row's speed gives, on its own cluster."""
    recipe = read_recipe(str(TINY))

    def cluster_of(step: str) -> Cluster:
        return load_cluster("repartition" if step == NAME else step)

    planned = plan_run(planned_workload(1_000, 7), recipe, CALIBRATION, cluster_of)
    steps = {each.step: each for each in planned.steps}
    assert list(steps).index(EXTRACT_FEATURES) + 1 == list(steps).index(NAME)
    assert steps[NAME].volume.tasks == steps[GENERATE_TARGETS].volume.tasks
    assert steps[NAME].core_seconds >= 1_000 * 3600 / X_REAL_TIME
    assert steps[NAME] in planned.student_pipeline()


def test_it_has_a_role_and_a_cluster() -> None:
    """Of the cluster file that is named for it; a Spark cluster may be requested for it."""
    resources = template({NAME: "repartition"})["Resources"]
    assert isinstance(resources, dict)
    assert "EnhanceFeaturesRole" in resources
    assert NAME in spark_steps()
    assert NAME in request_cluster._parser().format_help()


def test_a_scheduler_runs_it(run_job: RunJob) -> None:
    """With the manifest that it writes."""
    place = ("--recipe", str(TINY), "--run", "s3://bucket/run", "--kaldi-dir", "/data")
    steps = {each["name"]: each for each in json.loads(run_job("workflow", *place).out)["steps"]}
    assert steps[NAME]["manifests"] == [f"s3://bucket/run/{MADE}/manifest.json"]


def test_a_retry_of_features_removes_it(row: Step) -> None:
    """It is made from them; an increment makes it anew, as its row says."""
    recipe = read_recipe(str(TINY))
    assert MADE in later_steps(recipe, [FEATURES])
    assert written(recipe)[MADE].in_increment == "made"
    assert utterance_reads(recipe)[MADE] == [FEATURES]
    assert row.reads(recipe) == (FEATURES,)


def test_letters_pronounce_the_words_of_development_speakers() -> None:
    """So their features are the bootstrap's, too, and where they change it is made again."""
    rows, letters = read_recipe(str(TINY)), read_recipe(str(TINY), ["corpus.unknown_words=letters"])
    assert BOOTSTRAP_STEP in later_steps(letters, [features_step(DEV)])
    assert BOOTSTRAP_STEP not in later_steps(rows, [features_step(DEV)])
