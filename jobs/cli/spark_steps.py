"""Run the tasks of a pipeline step on the Spark cluster of the job."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import TypeVar

from infra.spark.session import run_tasks, spark_session
from jobs.cli.job import Job
from pipeline.runs.engine import Distribute

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
            return run_tasks(start(), elements, function, description, totals=job.tasks)

        yield distribute
