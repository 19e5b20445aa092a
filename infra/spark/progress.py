"""Wait for a Spark job with a progress bar, and give up if no executor takes its tasks."""

import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from pyspark import StatusTracker

from infra.log_lines import progress_bar

R = TypeVar("R")

IDLE_LIMIT_S = 1800.0
"""Seconds that a job may have no running task; clusters that grow on demand take minutes."""

_POLL_INTERVAL_S = 0.2


class TaskError(RuntimeError):
    """TaskError ends a Spark job that Spark will not retry; it names the work and the cause."""


def await_tasks(
    future: "Future[list[R]]",
    tracker: StatusTracker,
    group: str,
    num_tasks: int,
    description: str,
    idle_limit_s: float,
    watch: Callable[[], object],
) -> None:
    """Wait until `future`, which runs the job group, has a result or an error; raise neither.

    Calls `watch` five times a second; its errors are raised. Raises TaskError when no task of the
    group has run for `idle_limit_s`.
    """
    busy_at = time.monotonic()
    with progress_bar(description=description, total=num_tasks) as bar:
        while wait([future], timeout=_POLL_INTERVAL_S).not_done:
            watch()
            num_active, num_completed = _num_tasks(tracker, group)
            if num_active or num_completed != bar.n:
                busy_at = time.monotonic()
            elif time.monotonic() - busy_at > idle_limit_s:
                raise TaskError(
                    f"{description}: no task ran for {idle_limit_s:.0f} s, the limit; give the "
                    "cluster free cores, or ask for fewer (executor_memory, cores_per_executor)"
                )
            bar.update(num_completed - bar.n)
        if future.exception() is None:
            bar.update(num_tasks - bar.n)


def _num_tasks(tracker: StatusTracker, group: str) -> tuple[int, int]:
    """Return the numbers of active and of completed tasks of the group."""
    jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
    infos = [tracker.getStageInfo(stage) for job in jobs if job for stage in job.stageIds]
    stages = [stage for stage in infos if stage]
    active = sum(stage.numActiveTasks for stage in stages)
    return active, sum(stage.numCompletedTasks for stage in stages)
