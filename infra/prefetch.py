"""Prefetch: run slow calls ahead of their reader, in order, within a bound."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def prefetch(
    function: Callable[[T], R],
    items: Iterable[T],
    depth: int = 16,
    num_threads: int | None = None,
    enter: Callable[[T], bool] = lambda _: True,
    leave: Callable[[T], None] = lambda _: None,
) -> Generator[tuple[T, R], None, None]:
    """Yield each item with `function(item)`, in order; at most `depth` calls run or wait.

    An item is also kept waiting while `enter(item)` is false and others are before it; after the
    reader is done with it, `leave(item)` is called. So both can keep a budget.
    The calls run in `num_threads` threads, by default `depth`. An error of `function` is raised
    when its item's turn comes. After that, or when the caller closes the iterator early, calls
    that have not started are cancelled and the running ones are waited for.
    """
    pending: deque[tuple[T, Future[R]]] = deque()
    pool = ThreadPoolExecutor(num_threads or depth, thread_name_prefix="prefetch")
    try:
        for item in items:
            while pending and (len(pending) == depth or not enter(item)):
                oldest = pending[0][0]
                yield oldest, pending.popleft()[1].result()  # no name keeps the result alive
                leave(oldest)
            if not pending:
                enter(item)
            pending.append((item, pool.submit(function, item)))
        while pending:
            oldest = pending[0][0]
            yield oldest, pending.popleft()[1].result()
            leave(oldest)
    finally:
        pool.shutdown(cancel_futures=True)
