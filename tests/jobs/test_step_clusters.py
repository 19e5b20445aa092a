"""Each step's cluster: which one it has, and that its file permits what the step writes."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from infra.cluster import Cluster, load_cluster, shipped_clusters
from infra.platforms.emr import CODE
from infra.settings import ConfigurationError
from jobs.cli.arguments import RECIPES, cluster_of
from jobs.cli.job import job_parser, require_prefixes
from jobs.run_table import EXTRACT_FEATURES, STEPS, TRAIN_STUDENT
from tests.infra.platforms.account_files import account_file
from tests.job_programs import RunJob
from tests.whole_path.processes import TINY
from training.settings.recipe import Recipe, read_recipe

RUN = "s3://bucket/run"
EVERYTHING = (
    *(f"sequence_training.{model}=true" for model in ("baseline", "teacher", "student")),
    'targets.source="lattice"',
)
"""Settings by which steps write all that they ever do."""


def files_of(step: str) -> list[str]:
    """Return the shipped files of a step: its own, and those of other machines."""
    names = shipped_clusters()
    return [each for each in names if each == step or each.startswith(f"{step}_")]


@cache
def recipes() -> Mapping[str, Recipe]:
    """Read all shipped recipes, and one by which steps write all that they ever do."""
    found = {each.name: read_recipe(str(each)) for each in RECIPES.iterdir()}
    return {**found, "everything": read_recipe(str(TINY), EVERYTHING)}


@pytest.mark.parametrize("step", STEPS)
def test_a_shipped_cluster_permits_what_its_step_writes(step: str) -> None:
    """Manifests, checkpoints, lattices and records, under each recipe; so does the demo's."""
    assert step in files_of(step)
    for recipe in recipes().values():
        for name in (*files_of(step), "demo"):
            require_prefixes(step, recipe, load_cluster(name), RUN)


@pytest.mark.parametrize("kind", ["write_prefixes", "delete_prefixes"])
@pytest.mark.parametrize("step", STEPS)
def test_a_file_that_lacks_a_prefix_is_refused_by_name(step: str, kind: str) -> None:
    """Each prefix of a shipped file is needed; the message has the step, the place, the remedy."""
    cluster, recipe = load_cluster(step), recipes()["everything"]
    prefixes: Sequence[str] = getattr(cluster, kind)
    for prefix in prefixes:
        rest = tuple(each for each in prefixes if each != prefix)
        changed = {"delete_prefixes": ()} if kind == "write_prefixes" else {}
        lacking = replace(cluster, **{**changed, kind: rest})
        place = prefix.format(run=RUN, corpus=f"{RUN}/corpus")
        with pytest.raises(ConfigurationError, match=f"^{step}: {kind} .* lack {place}") as error:
            require_prefixes(step, recipe, lacking, RUN)
        assert f"--step-cluster {step}=FILE" in str(error.value)


def test_a_step_s_own_cluster_goes_first() -> None:
    """That of --step-cluster, then of --cluster, then of the recipe, then the step's own."""

    def instances(*options: str, of_recipe: str = "") -> Cluster:
        arguments = job_parser(EXTRACT_FEATURES, "", "").parse_args(
            ["--recipe", "demo", "--run", RUN, *options]
        )
        return cluster_of(EXTRACT_FEATURES, arguments, of_recipe)

    one = ("--step-cluster", f"{EXTRACT_FEATURES}=repartition")
    other = ("--step-cluster", f"{TRAIN_STUDENT}=train_teacher")
    assert instances() == load_cluster(EXTRACT_FEATURES)
    assert instances(of_recipe="demo") == load_cluster("demo")
    assert instances("--cluster", "ingest", *other, of_recipe="demo") == load_cluster("ingest")
    assert instances("--cluster", "ingest", *other, *one) == load_cluster("repartition")


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster file of one's own for extraction, in the working directory."""
    monkeypatch.chdir(tmp_path)
    shipped = Path(__file__).parents[2] / f"infra/clusters/{EXTRACT_FEATURES}.toml"
    own = tmp_path / "own.toml"
    own.write_text(shipped.read_text().replace("num_instances = 40", "num_instances = 30"))
    return own


def test_a_workflow_passes_each_step_s_cluster_on(run_job: RunJob, own_file: Path) -> None:
    """With the file's whole path, as workers have other folders; unknown ones are refused."""
    options = ("--recipe", "hours_1m", "--run", RUN, "--first", "select_utterances")
    given = ("--step-cluster", f"{EXTRACT_FEATURES}=own.toml")
    steps = json.loads(run_job("workflow", *options, *given).out)["steps"]
    for step in steps:
        place = step["command"].index("--step-cluster")
        assert step["command"][place + 1] == f"{EXTRACT_FEATURES}={own_file}"
    for wrong, said in (
        (f"{EXTRACT_FEATURES}=absent.toml", "one of bootstrap, "),
        (f"{EXTRACT_FEATURES}=repartition", f"lack {RUN}/features/"),
        ("extract=own.toml", "of the steps ingest, "),
    ):
        refused = run_job("workflow", *options, "--step-cluster", wrong)
        assert (refused.code, said in refused.err) == (2, True), refused.err


def test_a_request_is_for_the_step_s_own_cluster(run_job: RunJob, own_file: Path) -> None:
    """Thirty hosts in place of forty; hosts find the file where its --cluster says."""
    options = ("--recipe", "hours_1m", "--run", RUN, "--account", account_file("emr"))
    given = ("--step-cluster", f"{EXTRACT_FEATURES}=own.toml")
    request = run_job("request_cluster", "--step", EXTRACT_FEATURES, *options, *given).out
    assert '"InstanceCount": 30' in request
    assert f"{CODE}/{own_file.name}" in request
    refused = run_job("request_cluster", "--step", TRAIN_STUDENT, *options, "--cluster", "own.toml")
    assert f"{TRAIN_STUDENT}: write_prefixes of its cluster file lack {RUN}/models" in refused.err


def test_check_warns_of_models_without_gpus(run_job: RunJob) -> None:
    """The step, its days, the calibration and a file with GPUs; and of all steps' days."""
    options = ("--recipe", "hours_1m", "--run", "runs/x", "--device", "cpu")
    warned = f"check: {TRAIN_STUDENT} takes "
    assert warned not in run_job("check", *options).err
    assert warned in run_job("check", *options, "--step-cluster", f"{TRAIN_STUDENT}=demo").err
    said = run_job("check", *options, "--cluster", "demo")
    assert said.code == 0
    (line,) = [each for each in said.err.splitlines() if each.startswith(warned)]
    assert "days on 1 x local without GPUs, planned for 1,000,000 hours" in line
    assert line.endswith(f"by --step-cluster {TRAIN_STUDENT}=FILE, such as {TRAIN_STUDENT}")
    (line,) = [each for each in said.err.splitlines() if "all steps take" in each]
    assert "by the calibration two_cores; the longest is generate_targets" in line
