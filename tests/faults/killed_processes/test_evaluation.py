"""An executor that dies in evaluation changes no word error."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.names import EVALUATION_STEP
from tests.jobs.evaluable_toy_run import options_of, write_evaluable_toy_run
from tests.process_tree import descendants
from tests.whole_path.processes import REPOSITORY

pytestmark = pytest.mark.chaos

DEMO_CLUSTER = REPOSITORY / "infra" / "clusters" / "demo.toml"
PYTHON, EXECUTOR = "pyspark.daemon", "CoarseGrainedExecutorBackend"
LIMIT_S = 180.0


def evaluate(folder: Path, *others: str, kills: Sequence[str] = ()) -> tuple[Manifest, str]:
    """Evaluate the run of a folder, and kill tasks' processes of these kinds, one after the other.

    Returns the manifest and the log.
    """
    store, run_uri, corpus_uri = write_evaluable_toy_run(folder)
    command = [sys.executable, "-m", "jobs.evaluate", *options_of(run_uri, corpus_uri), *others]
    pending, path = list(kills), folder / "log"
    with path.open("wb") as log:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
        until = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < until:
            if pending and kill_task(process.pid, pending[0]):
                pending.pop(0)
            time.sleep(0.05)
        process.kill()
    said = path.read_text()
    assert process.returncode == 0, said[-4000:]
    assert pending == []
    return read_manifest(store, run_uri, EVALUATION_STEP), said


def kill_task(driver: int, kind: str) -> bool:
    """Kill an executor that has a task, or the Python that computes one, if there is any yet."""
    found = dict(descendants(driver))
    tasks = {
        each: [child for child, command in descendants(each) if PYTHON in command]
        for each, command in found.items()
        if kind in command
    }
    victims = [each for each, pythons in tasks.items() if pythons]
    if kind == PYTHON:  # the daemon's child, as the daemon computes nothing
        victims = [child for pythons in tasks.values() for child in pythons]
    for each in victims:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)
            return True
    return False


def test_an_executor_s_death_changes_no_word_error(tmp_path: Path) -> None:
    """Spark runs the lost slices again: hypotheses, errors and scores have the same bytes."""
    cluster = tmp_path / "cluster.toml"
    settings = f'"spark.executorEnv.PYTHONPATH" = "{REPOSITORY}"'
    text = DEMO_CLUSTER.read_text().replace("local[2]", "local-cluster[2,1,1024]")
    text = text.replace("cores_per_executor = 2", "cores_per_executor = 1")
    cluster.write_text(f"{text}\n{settings}\n")
    undisturbed, _ = evaluate(tmp_path / "undisturbed")
    given = ("--cluster", str(cluster))
    killed, said = evaluate(tmp_path / "killed", *given, kills=(EXECUTOR, PYTHON))
    assert killed.outputs == undisturbed.outputs
    assert "Lost executor" in said
