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


def add_summary(summaries: Accumulator[list[Any]], summarize: Callable[[R], S], result: R) -> None:
    """Add the summary of a result on its worker."""
    summaries.add([summarize(result)])
