"""Run the jobs' programs within this process, where a process of their own takes 3 s of CPU."""

import runpy
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from jobs.run import JOBS


class Said(NamedTuple):
    """Said holds a job's exit code and its two streams."""

    code: int
    out: str
    err: str


RunJob = Callable[..., Said]


def exit_code(name: str, *arguments: str) -> int:
    """Run jobs/<name>.py with some arguments; return its exit code."""
    path = str(JOBS / f"{name}.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *arguments])
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0


@pytest.fixture
def run_job(capsys: pytest.CaptureFixture[str]) -> RunJob:
    """Return a function that runs jobs/<name>.py with some arguments."""

    def run(name: str, *arguments: str) -> Said:
        code = exit_code(name, *arguments)
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return run
