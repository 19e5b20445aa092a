"""Run the tasks of a pipeline step on the Spark cluster of the job."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, TypeVar

from infra.spark.session import run_tasks, spark_session
from infra.task_metrics import Observer
from jobs.cli.job import Job
from pipeline.runs.engine import Distribute, Loss, WatchedFunction, loss_of

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def distribute_on_spark(job: Job) -> Iterator[Distribute]:
    """Yield a function that runs one Spark task an element; the session ends with the job.

    The requests and seconds of the tasks add up in `job.tasks`.
    """
    with ExitStack() as sessions:
        # At the first task, not before: a finished step takes seconds less without Spark.
        name = f"megahour {job.name}"
        start = cache(lambda: sessions.enter_context(spark_session(name, job.cluster)))

        def distribute(
            elements: Sequence[T], function: Callable[[T], R], description: str
        ) -> list[R]:
            run_task: Callable[[T], Any] = function
            observer: Observer[Any, Loss] | None = None
            if isinstance(function, WatchedFunction):
                run_task, observer = function.run_task, Observer(loss_of, function.watch.see)
            return run_tasks(
                start(), elements, run_task, description, observer=observer, totals=job.tasks
            )

        yield distribute
