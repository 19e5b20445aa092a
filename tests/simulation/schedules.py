"""Schedules of drivers and tasks on one store: who moves next, what fails, and what follows.

A state holds the store, each driver with its tasks, the attempts and requests that their senders
have given up, and the faults that are left. States are tuples of small numbers; the machine knows
the objects and the places in the code for which they stand.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.simulation.replayed_code import Call, Outcome, Point, run_code
from tests.simulation.simulated_s3 import (
    NO_ANSWER,
    UNAVAILABLE,
    Objects,
    Request,
    altered,
    perform,
    real_operation,
)

Code = Callable[[], Any]


class Action(NamedTuple):
    """Action says who moves, and what happens to the request or the process.

    `who` is a driver, a driver and its task, (ABANDONED, number) or (UNDERWAY, number).
    """

    what: str
    who: tuple[int, ...]

    def __str__(self) -> str:
        kind, *number = self.who
        name = {ABANDONED: "abandoned ", UNDERWAY: "request "}.get(kind, f"driver {kind} task ")
        return f"{self.what}: {name}{number[0]}" if number else f"{self.what}: driver {kind}"


ABANDONED, UNDERWAY = -1, -2

# Events that may happen, with the budget from which each takes one.
GO = "go"
LAND = "land"
CRASH, CRASH_AFTER, REPEAT = "crash", "crash after the request", "repeat"
BUSY, LOST, LATE, ALTERED = "503", "lose the answer", "take effect later", "alter the answer"
BUDGETS = {CRASH: 0, CRASH_AFTER: 0, REPEAT: 0, BUSY: 1, LOST: 2, LATE: 3, ALTERED: 4}


class Driver(NamedTuple):
    """Driver holds a driver's code and place, and its tasks' places while it waits for them."""

    code: int
    place: int
    tasks: tuple[int, ...] = ()


class State(NamedTuple):
    """State holds all that the future depends on."""

    store: int
    drivers: tuple[Driver, ...]
    abandoned: tuple[int, ...]
    underway: tuple[int, ...]
    budget: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults bounds how often each kind of fault happens in a schedule.

    A crash ends a driver, which begins again, or a task's attempt, which another one replaces.
    The attempts that crash stay at work unseen, and may end at any later time or never.
    """

    crashes: int = 0
    busy: int = 0
    lost: int = 0
    late: int = 0
    altered: int = 0

    @classmethod
    def of(cls, schedule: Sequence[Action]) -> "Faults":
        """Count the faults of a schedule."""
        counts = [0] * 5
        for action in schedule:
            if action.what in BUDGETS:
                counts[BUDGETS[action.what]] += 1
        return cls(*counts)

    @property
    def budget(self) -> tuple[int, ...]:
        return (self.crashes, self.busy, self.lost, self.late, self.altered)


class Machine:
    """Machine runs the real code of drivers and tasks, each place and each request once."""

    def __init__(self, codes: Sequence[Code]) -> None:
        self.stores: list[Objects] = []
        self.requests: list[Request] = []
        self.outcomes: dict[int, Outcome] = {}  # of the places where code has ended
        self.refused: set[int] = set()  # places where the same request is sent again
        self._points: list[tuple[Point, Point | None]] = []
        self._request_of: list[int] = []  # by place; -1 where it waits for none
        self._first: dict[int, tuple[int, ...]] = {}  # the tasks for which a driver's place waits
        self._numbers: dict[Any, int] = {}
        self._answers: list[Outcome] = []
        self._operations: dict[Call, Point] = {}
        self._tasks: dict[str, Point] = {}
        self._performed: dict[tuple[int, int], tuple[int, int]] = {}
        self._resumed: dict[tuple[int, int], int] = {}
        self._joined: dict[tuple[int, tuple[int, ...]], int] = {}
        self._busy = self._answer_number(UNAVAILABLE)
        self._unanswered = self._answer_number(NO_ANSWER)
        self.empty = self._store_number({})
        self._starts = tuple(self._place(run_code(code)) for code in codes)

    def initial(self, codes: Sequence[int], faults: Faults, store: int | None = None) -> State:
        """Return the state in which a driver of each code has yet to send its first request."""
        drivers = tuple(self._begun(code, self._starts[code]) for code in codes)
        return State(self.empty if store is None else store, drivers, (), (), faults.budget)

    def request_at(self, place: int) -> Request:
        """Return the request for whose answer the code at this place waits."""
        return self.requests[self._request_of[place]]

    def running(self, state: State) -> Iterator[tuple[tuple[int, ...], int]]:
        """Yield all that can move, with their places."""
        for number, driver in enumerate(state.drivers):
            if self._request_of[driver.place] >= 0:
                yield (number,), driver.place
            for task, place in enumerate(driver.tasks):
                if self._request_of[place] >= 0:
                    yield (number, task), place
        for number, place in enumerate(state.abandoned):
            yield (ABANDONED, number), place

    def actions(self, state: State) -> Iterator[Action]:
        """Yield all that can happen next."""
        crashes, busy, lost, late, alterations = state.budget
        for who, place in self.running(state):
            yield Action(GO, who)
            if who[0] == ABANDONED:
                continue
            request = self.requests[self._request_of[place]]
            if busy:
                yield Action(BUSY, who)
            if request.method == "PUT":
                if lost:
                    yield Action(LOST, who)
                if late:
                    yield Action(LATE, who)
                if crashes and len(who) == 1:
                    yield Action(CRASH_AFTER, who)
            elif alterations and request.method == "GET":
                yield Action(ALTERED, who)
            if crashes and len(who) == 2:
                yield Action(REPEAT, who)
        for number, driver in enumerate(state.drivers):
            if crashes and driver.place not in self.outcomes:
                yield Action(CRASH, (number,))
        for number in range(len(state.underway)):
            yield Action(LAND, (UNDERWAY, number))

    def step(self, state: State, action: Action) -> State:
        """Return the state after an action."""
        what, who = action
        if what == LAND:
            return self._land(state, who[1])
        store, drivers, abandoned, underway, budget = state
        if what != GO:
            place = BUDGETS[what]
            budget = (*budget[:place], budget[place] - 1, *budget[place + 1 :])
        if what in {CRASH, CRASH_AFTER}:
            return self._crash(state, who[0], what, budget)
        if who[0] == ABANDONED:
            store, place = self._answer(store, abandoned[who[1]], what)
            left = abandoned[: who[1]] + abandoned[who[1] + 1 :]
            return State(store, drivers, self._with(left, (place,)), underway, budget)
        driver = drivers[who[0]]
        if what == REPEAT:
            first = self._first[driver.place][who[1]]
            abandoned = self._with(abandoned, (driver.tasks[who[1]],))
            moved, left = self._moved(driver, who[1], first)
        else:
            place = driver.place if len(who) == 1 else driver.tasks[who[1]]
            if what == LATE:
                underway = tuple(sorted((*underway, self._request_of[place])))
            store, place = self._answer(store, place, what)
            if len(who) == 1:
                moved, left = self._begun(driver.code, place), ()
            else:
                moved, left = self._moved(driver, who[1], place)
        drivers = (*drivers[: who[0]], moved, *drivers[who[0] + 1 :])
        return State(store, drivers, self._with(abandoned, left), underway, budget)

    def _land(self, state: State, number: int) -> State:
        underway = state.underway
        store, _ = self._perform(state.store, underway[number])
        return state._replace(store=store, underway=underway[:number] + underway[number + 1 :])

    def _crash(self, state: State, number: int, what: str, budget: tuple[int, ...]) -> State:
        driver, store = state.drivers[number], state.store
        if what == CRASH_AFTER:
            store, _ = self._perform(store, self._request_of[driver.place])
        begun = self._begun(driver.code, self._starts[driver.code])
        return State(
            store,
            (*state.drivers[:number], begun, *state.drivers[number + 1 :]),
            self._with(state.abandoned, driver.tasks),
            state.underway,
            budget,
        )

    def _with(self, abandoned: tuple[int, ...], more: tuple[int, ...]) -> tuple[int, ...]:
        """Add attempts that nobody waits for, unless they have ended."""
        added = [place for place in more if self._request_of[place] >= 0]
        return tuple(sorted((*abandoned, *added))) if added else abandoned

    def _begun(self, code: int, place: int) -> Driver:
        """Return a driver at this place, with the tasks for which it waits there."""
        return Driver(code, place, self._first.get(place, ()))

    def _moved(self, driver: Driver, task: int, place: int) -> tuple[Driver, tuple[int, ...]]:
        """Return a driver one of whose tasks has moved, and the attempts that it leaves behind."""
        tasks = (*driver.tasks[:task], place, *driver.tasks[task + 1 :])
        failed = place in self.outcomes and self.outcomes[place].error is not None
        if not failed and any(self._request_of[each] >= 0 for each in tasks):
            return Driver(driver.code, driver.place, tasks), ()
        ends = (place,) if failed else tasks
        key = driver.place, ends
        if key not in self._joined:
            outcomes = [self.outcomes[each] for each in ends]
            answer = outcomes[0] if failed else Outcome([each.value for each in outcomes])
            self._joined[key] = self._place(self._points[driver.place][0].resume(answer))
        return self._begun(driver.code, self._joined[key]), tasks

    def _answer(self, store: int, place: int, what: str) -> tuple[int, int]:
        """Answer the request at a place; return the store and the place after that."""
        request = self._request_of[place]
        if what == BUSY:
            answer = self._busy
        elif what == LATE:
            answer = self._unanswered
        else:
            store, answer = self._perform(store, request)
            if what == LOST:
                answer = self._unanswered
            elif what == ALTERED:
                answer = self._answer_number(altered(self._answers[answer]))
        after = self._resumed.get((place, answer))
        if after is None:
            after = self._resumed[place, answer] = self._resume(place, self._answers[answer])
            if what == BUSY:
                self.refused.add(after)
        return store, after

    def _perform(self, store: int, request: int) -> tuple[int, int]:
        done = self._performed.get((store, request))
        if done is None:
            objects, answer = perform(self.stores[store], self.requests[request])
            done = self._store_number(objects), self._answer_number(answer)
            self._performed[store, request] = done
        return done

    def _resume(self, place: int, answer: Outcome) -> int:
        outer, inner = self._points[place]
        assert inner is not None, "only operations wait for answers to requests"
        return self._place(outer, inner.resume(answer))

    def _place(self, outer: Point, inner: Point | None = None) -> int:
        """Return the number of the place at which code waits for a request or tasks, or ends."""
        while outer.outcome is None and (inner is None or inner.outcome is not None):
            if inner is not None and inner.outcome is not None:
                outer, inner = outer.resume(inner.outcome), None
            elif outer.call is not None and outer.call.kind == "store":
                inner = self._operation(outer.call)
            elif outer.call is not None and len(outer.call.arguments) == 1:
                outer = outer.resume(Outcome([]))  # a driver without tasks waits for none
            else:
                break
        key = (id(outer), id(inner))
        if key not in self._numbers:
            self._numbers[key] = number = len(self._points)
            self._points.append((outer, inner))
            self._request_of.append(-1)
            if inner is not None and inner.call is not None:
                self._request_of[number] = self._request_number(inner.call.arguments[0])
            elif outer.outcome is not None:
                self.outcomes[number] = outer.outcome
            else:
                self._first[number] = self._first_places(outer)
        return self._numbers[key]

    def _operation(self, call: Call) -> Point:
        if call not in self._operations:
            self._operations[call] = run_code(lambda: real_operation(call))
        return self._operations[call]

    def _first_places(self, driver: Point) -> tuple[int, ...]:
        assert driver.call is not None
        function, *elements = driver.call.arguments
        return tuple(self._task(function, element) for element in elements)

    def _task(self, function: Callable[[Any], Any], element: Any) -> int:
        name = f"{getattr(function, '__qualname__', function)} {element}"
        if name not in self._tasks:
            self._tasks[name] = run_code(lambda: function(element))
        return self._place(self._tasks[name])

    def _store_number(self, objects: Objects) -> int:
        number = self._numbers.setdefault(frozenset(objects.items()), len(self.stores))
        if number == len(self.stores):
            self.stores.append(objects)
        return number

    def _request_number(self, request: Request) -> int:
        number = self._numbers.setdefault(request, len(self.requests))
        if number == len(self.requests):
            self.requests.append(request)
        return number

    def _answer_number(self, answer: Outcome) -> int:
        number = self._numbers.setdefault(str(answer), len(self._answers))
        if number == len(self._answers):
            self._answers.append(answer)
        return number
