"""Run the tasks of a pipeline step on the Spark cluster of the job."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, TypeVar

from infra.spark.observer import Observer
from infra.spark.session import run_tasks, spark_session
from infra.task_metrics import MeasuredFunction
from jobs.cli.job import Job
from pipeline.runs.engine import Distribute, WatchedFunction, measured_loss

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
            observer = None
            if isinstance(function, WatchedFunction):
                run_task, observer = function.run_task, Observer(measured_loss, function.see)
            measured = MeasuredFunction(run_task)
            found = run_tasks(start(), elements, measured, description, observer=observer)
            return [job.tasks.add(each) for each in found]

        yield distribute
