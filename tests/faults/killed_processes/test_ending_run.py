"""A run that is interrupted, terminated or killed leaves no process of its step behind."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from tests.whole_path.processes import REPOSITORY, left_behind

pytestmark = pytest.mark.cluster
PROGRAM = Path(__file__).with_name("ending_run.py")
LIMIT_S = 60.0
"""The supervisor kills after 5 s what has not ended by itself; a step would wait for 300 s."""

NUM_WORKERS = {"python": 1, "torchrun": 2, "Spark": 2}
ENDINGS = {
    signal.SIGINT: (130, "run: interrupted: the same command resumes\n"),
    signal.SIGTERM: (143, "run: terminated: the same command resumes\n"),
    signal.SIGKILL: (-9, ""),
}


def begin(kind: str, mark: str) -> "subprocess.Popen[str]":
    """Start a run; return it when each worker of its step is at work."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "MEGAHOUR_TEST_MARK": mark}
    # A script's background job ignores SIGINT, and so would all that it starts.
    command = ["env", "--default-signal=INT", sys.executable, str(PROGRAM), kind]
    run = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    said = ""
    while said.count("ready") < NUM_WORKERS[kind]:
        line = run.stderr.readline()
        assert line, said
        said += line
    return run


@pytest.mark.parametrize(
    ("kind", "number"),
    [
        ("python", signal.SIGINT),
        ("torchrun", signal.SIGKILL),
        ("Spark", signal.SIGTERM),
        pytest.param("torchrun", signal.SIGINT, marks=pytest.mark.chaos),
        pytest.param("Spark", signal.SIGKILL, marks=pytest.mark.chaos),
    ],
)
def test_no_process_is_left_behind(kind: str, number: signal.Signals) -> None:
    """Drivers, JVMs, workers and ranks end within seconds; the run says one line, if it can."""
    mark = f"mark-{uuid.uuid4().hex}"
    run = begin(kind, mark)
    assert run.stderr is not None
    assert left_behind(mark)
    began = time.monotonic()
    run.send_signal(number)
    said = run.stderr.read()
    code = run.wait()
    while left_behind(mark) and time.monotonic() - began < LIMIT_S:
        time.sleep(0.1)
    assert left_behind(mark) == []
    assert (code, said) == ENDINGS[number]
