"""Run a pipeline step's tasks on the Spark cluster of the job."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from infra.spark import run_tasks, spark_session
from jobs.command_line import Job
from pipeline.steps.commit import Distribute

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def distribute_on_spark(job: Job) -> Iterator[Distribute]:
    """A function that runs one Spark task per element; the session ends with the job."""
    session = spark_session(f"megahour {job.step}", job.cluster)

    def distribute(elements: Sequence[T], function: Callable[[T], R], description: str) -> list[R]:
        return run_tasks(session, elements, function, description)

    try:
        yield distribute
    finally:
        session.stop()
