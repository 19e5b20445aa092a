"""Ranks divide tasks of any length: none waits in one exchange for another's task."""

import signal
from collections.abc import Callable
from functools import partial

import pytest
from torch.distributed import ProcessGroup

from infra.bounded_process import BoundedProcess
from jobs.cli.training_steps import TIME_LIMITS_S
from tests.infra.called_functions import hold_gil
from tests.training.distributed.rank_processes import NUM_RANKS, World
from training.distributed import collectives
from training.distributed.collectives import run_own_tasks
from training.distributed.simulated_group import simulate_ranks

TIME_LIMIT_S = 2.0
PATIENCE_S = 60
SLOW_RANK = 1


def one_slow_rank(group: ProcessGroup, report_begin: Callable[[], None], seconds: int = 5) -> None:
    """Five tasks on four ranks; the second searches for longer than an exchange may take."""
    done = []

    def work(task: int) -> int:
        if task == SLOW_RANK:
            with BoundedProcess(int) as search:
                search.call(partial(hold_gil, seconds=seconds), 60.0)
        done.append(task)
        return task

    report_begin()
    seen: list[int] = []
    run_own_tasks(range(5), work, seen.append, group)
    assert done == list(range(5))[group.rank() :: NUM_RANKS]
    assert seen[-1] == sum(range(5))


def test_a_task_may_take_longer_than_an_exchange() -> None:
    """The group's limit is 2 s, a search takes 5 and holds its GIL: every rank ends well.

    All know the losses of all.
    """
    world = World(one_slow_rank, TIME_LIMIT_S)
    try:
        world.wait_for_training()
        ends = world.ends(range(NUM_RANKS), PATIENCE_S)
        assert [end.exit_code for end in ends] == [0] * NUM_RANKS, ends
    finally:
        world.close()


def test_ranks_that_wait_for_a_killed_one_end() -> None:
    """It is killed within its task; the others end at once, and name it."""
    world = World(partial(one_slow_rank, seconds=PATIENCE_S), PATIENCE_S)
    try:
        world.wait_for_training()
        world.send_signal(SLOW_RANK, signal.SIGKILL)
        for end in world.ends([rank for rank in range(NUM_RANKS) if rank != SLOW_RANK], 30.0):
            assert end.exit_code == 1, end
            assert f"process {world.processes[SLOW_RANK].pid}) did not answer" in end.message, end
    finally:
        world.close()


def test_ranks_meet_within_the_least_time_limit() -> None:
    """Twice within it at least, and not so often that waiting takes a core."""
    assert 0.05 <= collectives.SLICE_S <= TIME_LIMITS_S.least / 2


def test_a_tasks_error_is_its_ranks() -> None:
    """It is raised in the rank's own thread, and ends all."""

    def fail(task: int) -> int:
        raise OSError(f"task {task} has no disk")

    with pytest.raises(OSError, match="task 0 has no disk"):
        simulate_ranks(1, partial(run_own_tasks, range(3), fail, lambda _: None))
