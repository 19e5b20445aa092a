"""Run the jobs' programs within this process, where a process of their own takes 3 s of CPU."""

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from jobs.run import JOBS


@dataclass(frozen=True)
class Said:
    """Said holds a job's exit code and its two streams."""

    code: int
    out: str
    err: str


RunJob = Callable[..., Said]


@pytest.fixture
def run_job(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunJob:
    """Return a function that runs jobs/<name>.py with some arguments."""

    def run(name: str, *arguments: str) -> Said:
        path = JOBS / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        code = 0
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            code = int(ended.code or 0)
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return run
