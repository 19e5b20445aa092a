"""Retries are bounded in number and time, have jitter, and follow transient errors alone."""

import random
import time
from collections.abc import Callable
from socket import gethostname

import pytest

from infra.store import retry as module
from infra.store.retry import GaveUpError, retry
from infra.task_metrics import (
    FAULTS,
    REQUESTS,
    MeasuredFunction,
    RequestCounter,
    RequestCounts,
    TaskTotals,
)


def failing(times: int, error: Exception) -> Callable[[], str]:
    """Return a function that raises `error` that many times, then succeeds."""
    remaining = [error] * times

    def act() -> str:
        if remaining:
            raise remaining.pop()
        return "done"

    return act


def is_os_error(error: Exception) -> bool:
    return isinstance(error, OSError)


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the waits, and take no time for them."""
    found: list[float] = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


def test_transient_errors_are_repeated_and_counted(waits: list[float]) -> None:
    """Four transient failures cost four waits, and four retries are counted."""
    before = REQUESTS.total()
    assert retry(failing(4, OSError()), is_os_error) == "done"
    assert len(waits) == (REQUESTS.total() - before).retries == 4


def test_other_errors_are_raised_at_once(waits: list[float]) -> None:
    """An error that is not transient costs no second attempt."""
    with pytest.raises(KeyError):
        retry(failing(1, KeyError()), is_os_error)
    assert waits == []


def test_attempts_are_bounded(waits: list[float]) -> None:
    """After the tenth failure the last error is raised, with the attempts and seconds."""
    with pytest.raises(GaveUpError, match="given up after 10 attempts in") as caught:
        retry(failing(99, OSError("busy")), is_os_error)
    assert str(caught.value.last) == "busy"
    assert len(waits) == 9


def test_no_attempt_begins_after_the_limit() -> None:
    """Slow failures are given up when the time is over."""

    def slow() -> None:
        time.sleep(0.05)
        raise OSError

    with pytest.raises(GaveUpError, match=r"given up after [1-4] attempts in"):
        retry(slow, is_os_error, max_attempts=1000, limit_s=0.2)


def test_waits_double_with_full_jitter(waits: list[float]) -> None:
    """The n-th wait is uniform up to 0.1 s x 2^n, at most 20 s."""
    random.seed(5)
    for _ in range(300):
        with pytest.raises(GaveUpError):
            retry(failing(99, OSError()), is_os_error, max_attempts=12, limit_s=1e9)
    for attempt in range(11):
        bound_s = min(module.FIRST_WAIT_S * 2**attempt, module.LONGEST_WAIT_S)
        nth = waits[attempt::11]
        assert max(nth) <= bound_s
        assert sum(nth) / len(nth) == pytest.approx(bound_s / 2, rel=0.12)


def test_counts_add_up_over_tasks() -> None:
    """A measured function returns its result with its own requests and seconds."""
    counter = RequestCounter()
    counter.add(RequestCounts(get=2, bytes_received=5))
    counter.add(RequestCounts(get=1, put=1))
    assert counter.total() == RequestCounts(get=3, put=1, bytes_received=5)
    assert counter.total().num_requests == 4
    totals = TaskTotals()

    def task(number: int) -> int:
        REQUESTS.add(RequestCounts(get=number))
        return number * number

    assert [totals.add(MeasuredFunction(task)(number)) for number in (2, 3)] == [4, 9]
    assert totals.requests == RequestCounts(get=5)
    assert totals.seconds >= 0


def test_faults_of_devices_come_with_the_tasks_that_saw_them() -> None:
    """A task that failed before, in the same process, leaves none to the next."""
    totals = TaskTotals()

    def task(number: int) -> int:
        for _ in range(number):
            FAULTS.add("cuda:3", "left out", f"reason\n {number}")
        return number

    FAULTS.add("cuda:0", "server lost", "of a task that failed")
    assert [totals.add(MeasuredFunction(task)(number)) for number in (0, 1, 2)] == [0, 1, 2]
    (fault,) = totals.faults
    host = gethostname()
    assert str(fault) == f"cuda:3 of {host}: left out on 2 tasks: reason 1"
