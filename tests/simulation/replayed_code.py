"""Run real code up to its next call to the outside, and remember how it continues.

A piece of code whose only state is local does the same again if its calls return the same. So its
state is the list of what its calls returned: it is run from its start with these answers, up to the
first call without one. Each list of answers is run once, however many schedules come by it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Call:
    """A call to the outside at which the code waits: its kind, and what it asks for."""

    kind: str
    name: str
    arguments: tuple[Any, ...] = ()


class SuspendedError(BaseException):
    """Leaves the code at a call that has no answer yet; no `except Exception` stops it."""

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        self.call = call


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a piece of code, or the answer to a call: a value, or an exception to raise."""

    value: Any = None
    error: Exception | None = None

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {self.error}" if self.error else f"{self.value!r}"


@dataclass(slots=True)
class Point:
    """A place in a piece of code: the call at which it waits, or its outcome."""

    code: Callable[[], Any]
    history: tuple[tuple[Call, Outcome], ...]
    call: Call | None = None
    outcome: Outcome | None = None
    after: dict[str, "Point"] = field(default_factory=dict)

    def resume(self, answer: Outcome) -> "Point":
        """Return the place to which the code comes if its call is answered so."""
        key = str(answer)
        if key not in self.after:
            assert self.call is not None, "code that has ended waits for no answer"
            self.after[key] = run_code(self.code, (*self.history, (self.call, answer)))
        return self.after[key]


def outcome_of(code: Callable[[], Any]) -> Outcome:
    """Run code to its end; whatever it raises is its outcome."""
    try:
        return Outcome(code())
    except Exception as error:
        return Outcome(error=error)


@dataclass(slots=True)
class _Replay:
    """_Replay holds the answers to the code that runs now, and how many it has had of them.

    The code's calls come through boto3, which could pass nothing along.
    """

    answers: tuple[tuple[Call, Outcome], ...] = ()
    num_given: int = 0


_REPLAY = _Replay()


def run_code(code: Callable[[], Any], history: tuple[tuple[Call, Outcome], ...] = ()) -> Point:
    """Run `code` from its start with these answers, up to its next call or its end."""
    _REPLAY.answers, _REPLAY.num_given = history, 0
    point = Point(code, history)
    try:
        point.outcome = outcome_of(code)
    except SuspendedError as suspended:
        point.call = suspended.call
    fewer = f"the same answers led to fewer calls: {point.outcome or point.call}"
    assert _REPLAY.num_given == len(history), fewer
    return point


def ask(call: Call) -> Any:
    """Answer a call of the code that runs, as often as there are answers; then suspend it."""
    if _REPLAY.num_given == len(_REPLAY.answers):
        raise SuspendedError(call)
    asked, answer = _REPLAY.answers[_REPLAY.num_given]
    assert asked == call, f"the same answers led to {call}, before to {asked}"
    _REPLAY.num_given += 1
    if answer.error is not None:
        raise answer.error.with_traceback(None)
    return answer.value
