"""Let the driver see a summary of each task's result as soon as the task has ended.

Workers import this module, so it imports nothing that only a driver has.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pyspark import Accumulator, AccumulatorParam

T = TypeVar("T")
R = TypeVar("R")
S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class Observer(Generic[R, S]):
    """Observer summarizes each result on its worker, and sees the summary in the driver at once.

    An error of `see` cancels the job and is raised.
    """

    summarize: Callable[[R], S]
    see: Callable[[S], None]


class Summaries(AccumulatorParam[list[Any]]):
    """Summaries adds up lists of summaries; Spark counts those of an attempt that counts, once."""

    def zero(self, value: list[Any]) -> list[Any]:
        """Return an empty list."""
        del value
        return []

    def addInPlace(self, value1: list[Any], value2: list[Any]) -> list[Any]:  # noqa: N802
        """Append the summaries of one attempt."""
        value1.extend(value2)
        return value1


@dataclass(frozen=True, slots=True)
class ObservedFunction(Generic[T, R]):
    """ObservedFunction runs a task on its worker, and adds its result's summary."""

    function: Callable[[T], R]
    summarize: Callable[[R], Any]
    summaries: Accumulator[list[Any]]

    def __call__(self, task: T) -> R:
        """Run the function on `task`."""
        result = self.function(task)
        self.summaries.add([self.summarize(result)])
        return result
