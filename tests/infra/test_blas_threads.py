"""Steps and tasks multiply matrices in one thread, though the environment asks for two."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COUNT = """\
import numpy
from threadpoolctl import threadpool_info

def threads(*_):
    return [each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"]

assert threads() == [2], threads()
"""
OF_TASK = """\
from infra.task_metrics import MeasuredFunction

print(MeasuredFunction(threads)(0).result)
"""
OF_STEP = """\
from jobs.cli.command_line import Step, main

main(Step("certify", "", lambda job: print(threads()) or []))
"""


@pytest.mark.parametrize("program", [OF_TASK, OF_STEP], ids=["task", "step"])
def test_matrices_are_multiplied_in_one_thread(program: str, tmp_path: Path) -> None:
    """Other orders of sums would give trees of other bits on hosts with other cores."""
    done = subprocess.run(
        [sys.executable, "-c", COUNT + program, "--recipe", "demo", "--run", str(tmp_path)],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.startswith("[1]\n"), done.stdout + done.stderr
