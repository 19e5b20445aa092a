"""Divide tasks among the ranks; all ranks meet while some are at work, for however long."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TypeVar

import torch

from training.distributed import collectives
from training.distributed.process_group import ProcessGroup

T = TypeVar("T")

SLICE_S = 0.2
"""Ranks meet so often; an exchange's time limit, a second at least, bounds the wait for one."""


def run_own_tasks(
    tasks: Sequence[T],
    count_losses: Callable[[T], int],
    check_losses: Callable[[int], None],
    group: ProcessGroup,
) -> None:
    """Run every size-th of the tasks on this rank; return once all ranks have run theirs.

    `check_losses` sees on every rank what all tasks so far have lost, and may raise to end them.
    Raises a task's own error, and CollectiveError where another rank is dead.
    """
    todo = list(tasks[group.rank() :: group.size()])
    current: Future[int] | None = None
    num_lost, num_busy = 0, 1
    while num_busy:
        if current is None and todo:
            current = _started(count_losses, todo.pop(0))
        # A rank without a task waits in the exchange, for a slice of the others' time.
        if current is not None and wait([current], timeout=SLICE_S).done:
            num_lost += current.result()
            current = None
        is_busy = current is not None or bool(todo)
        sums = torch.tensor([is_busy, num_lost], dtype=torch.int64)
        collectives.all_reduce_sum(sums, group)
        num_busy, lost_by_all = sums.tolist()
        check_losses(lost_by_all)


def _started(function: Callable[[T], int], task: T) -> Future[int]:
    """Run a task in a thread that does not keep alive a process that ends."""
    future: Future[int] = Future()

    def run() -> None:
        try:
            future.set_result(function(task))
        except BaseException as error:  # `result` raises it in the rank's thread
            future.set_exception(error)

    threading.Thread(target=run, name="rank task", daemon=True).start()
    return future
