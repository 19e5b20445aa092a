"""Airflow runs the steps of a run by real spark-submit, and its retry continues a killed one.

Three steps of twelve, since each takes seconds to start: ingest, and the first two on Spark.
"""

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from infra.store.object_store import ObjectStore, join_uri
from jobs.ingestion.corpus import ingest
from pipeline.runs.manifest import manifest_uri
from pipeline.runs.names import SUBSETS, features_step
from pipeline.steps.features import extract_features
from pipeline.steps.selection.select import metadata_uri, select_utterances
from tests.job_programs import RunJob
from tests.small_corpus import serially
from tests.whole_path.processes import TINY
from tests.whole_path.reduced_an4 import write_reduced_an4
from training.recipes import read_recipe

pytestmark = [pytest.mark.timeout(2400), pytest.mark.cluster]

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-airflow" / "bin" / "python"
DATE = "2026-11-20"
STEPS = ["ingest", "select_utterances", "extract_features"]
MARK = "MEGAHOUR_TEST_DAG"


@dataclass(frozen=True)
class DagRun:
    """DagRun is a finished run of the DAG: what Airflow says, and what was there at the kill."""

    run_uri: str
    said: dict[str, Any]
    commits_before: dict[Path, int]

    @property
    def commits(self) -> dict[Path, int]:
        return commits_below(Path(self.run_uri))


@pytest.fixture
def dag_run(run_job: RunJob, an4_dir: Path, tmp_path: Path) -> DagRun:
    """Run the DAG, and kill the driver of feature extraction after its first commit."""
    assert PYTHON.exists(), f"{PYTHON} is not there: make .venv-airflow/.ready"
    kaldi_dir = write_reduced_an4(an4_dir, tmp_path / "kaldi")
    folder = tmp_path / "dags"
    folder.mkdir()
    (folder / "megahour_dag.py").symlink_to(ROOT / "infra" / "airflow" / "megahour_dag.py")
    shared = ("--recipe", str(TINY), "--run", str(tmp_path / "runs" / "{{ ds }}"))
    some = ("--kaldi-dir", str(kaldi_dir), "--last", STEPS[-1], "--name", "nightly")
    printed = run_job("workflow", *shared, *some, "--retries", "1", "--retry-delay-s", "0")
    assert printed.code == 0, printed.err
    (folder / "nightly.workflow.json").write_text(printed.out)

    run_uri, mark = str(tmp_path / "runs" / DATE), uuid.uuid4().hex
    environment = {
        "HOME": str(tmp_path),
        "PATH": os.defpath,
        "SPARK_SUBMIT_OPTS": os.environ["SPARK_SUBMIT_OPTS"],
        "AIRFLOW_HOME": str(tmp_path / "airflow"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_FOLDER": str(folder),
        "MEGAHOUR_WORKFLOWS": str(folder),
        MARK: mark,
    }
    migrate = [str(PYTHON), "-m", "airflow", "db", "migrate"]
    subprocess.run(migrate, env=environment, check=True, capture_output=True)
    program = Path(__file__).with_name("dag_run.py")
    command = [str(PYTHON), str(program), str(folder), "nightly", DATE]
    log = tmp_path / "dag_run.log"
    with log.open("wb") as output:
        airflow = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        before = kill_driver(Path(run_uri), mark, airflow)
        airflow.wait(timeout=1800)
    finally:
        airflow.kill()
        airflow.wait()
    assert airflow.returncode == 0, log.read_text()[-4000:]
    return DagRun(run_uri, json.loads(log.read_text().splitlines()[-1]), before)


def kill_driver(run: Path, mark: str, airflow: "subprocess.Popen[bytes]") -> dict[Path, int]:
    """Wait for the first commit of features, and kill their driver; return the commits there."""
    while not (found := commits_below(run)):
        assert airflow.poll() is None, "it ended before a task was committed"
        time.sleep(0.02)
    (driver,) = drivers(mark)
    os.kill(driver, signal.SIGKILL)
    return found


def commits_below(run: Path) -> dict[Path, int]:
    """Return the commit records of features, each with its time of writing in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in run.glob("features/*/commits/*.json")}


def drivers(mark: str) -> Iterator[int]:
    """Yield the JVMs of feature extraction that the marked DAG has started."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
            program, *words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_driver = program.endswith(b"/java") and any(b"extract_features.py" in w for w in words)
        if is_driver and f"{MARK}={mark}".encode() in environment:
            yield int(process.name)


def test_a_killed_step_is_retried_and_continues(dag_run: DagRun) -> None:
    """The DAG succeeds; the killed step was tried twice, and did no committed task again.

    Its groups are the steps in order, its assets the manifests of that date, and selection and
    features have the bytes of a plain loop.
    """
    said = dag_run.said
    assert said["state"] == "success"
    assert said["order"] == [f"{step}.{task}" for step in STEPS for task in ("run", "manifests")]
    tries = {f"{step}.run": ["success", 1] for step in STEPS}
    assert {key: said["tasks"][key] for key in tries} == tries | {
        "extract_features.run": ["success", 2]
    }
    steps = [
        "ingest",
        *(f"{name}/{subset}" for name in ("selection", "features") for subset in SUBSETS),
    ]
    manifests = {step: Path(manifest_uri(dag_run.run_uri, step)) for step in steps}
    assert said["assets"] == sorted(f"file://{path}" for path in manifests.values())

    before, after = dag_run.commits_before, dag_run.commits
    assert 0 < len(before) < len(after)
    assert before == {path: after[path] for path in before}, "a committed task was done again"

    run = Path(dag_run.run_uri)
    store, plain = ObjectStore((str(run.parent),)), str(run.parent / "plain")
    recipe, corpus = read_recipe(str(TINY)), join_uri(plain, "corpus")
    ingest(run.parents[1] / "kaldi", store, corpus)
    for subset in SUBSETS:
        uri, budget = metadata_uri(corpus, subset), recipe.loss_budget
        select_utterances(store, plain, subset, uri, recipe.selection, budget, serially)
        extract_features(store, plain, subset, corpus, recipe.features, budget, serially)
        path = manifest_uri(plain, features_step(subset))
        assert store.get(path) == manifests[features_step(subset)].read_bytes()
