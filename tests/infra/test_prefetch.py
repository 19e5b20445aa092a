"""Prefetching keeps order, bounds and errors, and leaves no call behind."""

import threading
from collections.abc import Iterator
from itertools import count, islice

import pytest

from infra.prefetch import prefetch

TIME_LIMIT_S = 30


def test_results_keep_the_order_of_items() -> None:
    """A slow first call delays the later ones, which finish before it, and changes no order."""
    later_done = threading.Event()

    def square(number: int) -> int:
        if number == 0:
            assert later_done.wait(TIME_LIMIT_S)
        elif number == 2:
            later_done.set()
        return number**2

    assert list(prefetch(square, range(5), depth=3)) == [(n, n**2) for n in range(5)]


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_than_depth_items_are_taken_ahead(depth: int) -> None:
    """Before the reader takes result n, at most n + depth + 1 items have left an endless source."""
    taken = []

    def source() -> Iterator[int]:
        for number in count():
            taken.append(number)
            yield number

    results = prefetch(str, source(), depth)
    for number in range(4):
        assert next(results) == (number, str(number))
        assert len(taken) == number + depth + 1
    results.close()


def test_num_threads_bounds_the_calls_at_once() -> None:
    """With two threads and five calls ahead, never more than two calls run at once."""
    running, most = 0, 0
    changes = threading.Condition()

    def call(_: int) -> None:
        nonlocal running, most
        with changes:
            running += 1
            most = max(most, running)
            changes.notify_all()
            changes.wait_for(lambda: most == 2, TIME_LIMIT_S)
            running -= 1

    assert len(list(prefetch(call, range(20), depth=5, num_threads=2))) == 20
    assert most == 2


def test_an_error_comes_in_its_items_turn() -> None:
    """Results before the failing item are yielded; its error ends the iterator."""
    results = prefetch(lambda number: 6 // (2 - number), range(9), depth=4)
    assert list(islice(results, 2)) == [(0, 3), (1, 6)]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert next(results, None) is None


def test_closing_cancels_what_has_not_started() -> None:
    """After close() the running call has ended, the waiting ones never start, no thread is left."""
    started, released = [], threading.Event()

    def call(number: int) -> int:
        started.append(number)
        assert number == 0 or released.wait(TIME_LIMIT_S)
        return number

    results = prefetch(call, range(9), depth=5, num_threads=1)
    assert next(results) == (0, 0)
    closing = threading.Timer(0.1, released.set)
    closing.start()
    results.close()
    closing.join()
    assert started in ([0], [0, 1])
    assert not any(each.name.startswith("prefetch") for each in threading.enumerate())
