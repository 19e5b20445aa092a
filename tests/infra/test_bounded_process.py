"""Calls in a process of their own give values or errors, and the caller outlives them."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from infra.bounded_process import BoundedProcess, CallError
from tests.infra.called_functions import (
    be_killed_once,
    burn,
    crash,
    fail,
    made_by,
    place,
    spin,
)

LIMIT_S = 30


def has_ended(process: int) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while Path(f"/proc/{process}").exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.fixture
def process() -> Iterator[BoundedProcess[int]]:
    with BoundedProcess(made_by) as process:
        yield process


def test_values_and_errors_come_back(process: BoundedProcess[int]) -> None:
    """One process makes the context once and answers all calls, also after one that raised."""
    context, where = process.call(place, 60.0)
    assert context == where != os.getpid()
    with pytest.raises(ValueError, match="7 frames: need 8"):
        process.call(fail, 60.0)
    assert process.call(place, 60.0) == (context, context)


def test_a_call_has_a_bound_on_its_cpu_time(process: BoundedProcess[int]) -> None:
    """One that never returns ends after its second; others before and after it do not count."""
    first, _ = process.call(place, 60.0)
    for _ in range(2):
        process.call(partial(burn, seconds=0.7), 1.0)
    with pytest.raises(CallError, match="took more than 1 s of CPU time"):
        process.call(spin, 1.0)
    assert has_ended(first)
    assert process.call(place, 60.0)[0] != first


def test_a_call_is_tried_again_when_its_process_was_killed(
    process: BoundedProcess[int], tmp_path: Path
) -> None:
    """Killed once, it returns its value; a crash that repeats is the call's own error."""
    assert process.call(partial(be_killed_once, mark=tmp_path / "mark"), 60.0) == "whole"
    with pytest.raises(CallError, match=r"was killed by signal 11 \(SIGSEGV\), twice"):
        process.call(crash, 60.0)
    assert process.call(place, 60.0)


def test_a_context_that_cannot_be_made_is_no_calls_error() -> None:
    """Its error is raised as it is, and a process that ends meanwhile is no CallError."""
    with BoundedProcess(partial(int, "seven")) as broken:
        for _ in range(2):
            with pytest.raises(ValueError, match="seven"):
                broken.call(place, 60.0)
    with (
        BoundedProcess(partial(open, "/absent")) as absent,
        pytest.raises(FileNotFoundError, match="/absent"),
    ):
        absent.call(place, 60.0)
    with BoundedProcess(partial(os._exit, 3)) as ended:
        with pytest.raises(RuntimeError, match="exit code 3 before the first call") as found:
            ended.call(place, 60.0)
        assert not isinstance(found.value, CallError)


def test_no_process_outlives_its_caller() -> None:
    """Neither after the context manager, nor within a call of a caller that is killed."""
    with BoundedProcess(made_by) as inner:
        number, _ = inner.call(place, 60.0)
    assert has_ended(number)
    script = (
        "from infra.bounded_process import BoundedProcess\n"
        "from tests.infra.called_functions import made_by, place, spin\n"
        "with BoundedProcess(made_by) as process:\n"
        "    print(process.call(place, 60.0)[0], flush=True)\n"
        "    process.call(spin, 60.0)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        number = int(caller.stdout.readline())
        caller.kill()
    assert has_ended(number)
