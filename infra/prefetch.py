"""Do slow things ahead of their reader, in order, with a bound on how many."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def prefetch(
    function: Callable[[T], R], items: Iterable[T], depth: int, num_threads: int | None = None
) -> Generator[tuple[T, R], None, None]:
    """Yield each item with `function(item)`, in order; at most `depth` are running or waiting.

    They run in `num_threads` threads, by default in as many as `depth`.
    Closing the iterator early cancels what has not started and waits for what has.
    """
    pending: deque[tuple[T, Future[R]]] = deque()
    pool = ThreadPoolExecutor(num_threads or depth, thread_name_prefix="look-ahead")
    try:
        for item in items:
            if len(pending) == depth:
                oldest, future = pending.popleft()
                yield oldest, future.result()
            pending.append((item, pool.submit(function, item)))
        while pending:
            oldest, future = pending.popleft()
            yield oldest, future.result()
    finally:
        pool.shutdown(cancel_futures=True)
