"""Explore all schedules of a machine: each state once, without orders that make no difference."""

import gc
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from tests.simulation.schedules import GO, LAND, UNDERWAY, Action, Faults, Machine, State
from tests.simulation.simulated_s3 import Objects, Request

FAULT_RATE = 0.1
"""The share of a random schedule's actions that are faults, while there are any left."""


class Check(Protocol):
    """Check raises AssertionError if a property does not hold: in a state, a step or an end."""

    def check(self, state: State) -> None: ...
    def check_step(self, before: State, after: State) -> None: ...
    def check_end(self, state: State) -> None: ...


@dataclass(frozen=True, slots=True)
class Scenario:
    """Scenario holds the drivers' codes, by number, the machine that runs them, and the checks.

    `name` is an expression that makes the scenario again.
    """

    machine: Machine
    check: Check
    drivers: tuple[int, ...]
    name: str = "scenario"


class ViolationError(Exception):
    """A property does not hold; `schedule` leads there from the initial state."""

    def __init__(self, scenario: "Scenario", message: str, schedule: Sequence[Action]) -> None:
        steps = "".join(f"\n  {action}" for action in schedule)
        again = f"replay({scenario.name}, {[tuple(action) for action in schedule]})"
        super().__init__(f"{message}\nafter:{steps}\n{again}")
        self.message = message
        self.schedule = tuple(schedule)


@dataclass(slots=True)
class Exploration:
    """Exploration counts the states, the steps between them, and the schedules to an end."""

    num_states: int = 0
    num_steps: int = 0
    num_schedules: int = 0


@dataclass
class Commuting:
    """Commuting says which requests make no difference by their order among all others.

    It knows the requests so far. A PUT commutes if each request that touches its key is a PUT of
    the same bytes, as of shards, whose keys hold their digests. Where an object is written once,
    a request that finds it commutes: a read, or a conditional PUT.
    """

    machine: Machine
    _bodies: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    _read: set[str] = field(default_factory=set)
    _deleted: set[str] = field(default_factory=set)
    _prefixes: set[str] = field(default_factory=set)
    _num_known: int = 0

    def learn(self) -> bool:
        """Look at the requests that are new; return whether one changes what was known of a key."""
        has_changed = False
        while self._num_known < len(self.machine.requests):
            request = self.machine.requests[self._num_known]
            self._num_known += 1
            keys = [key for key in self._known() if request.key == key or _lists(request, key)]
            before = [self._facts(key) for key in keys]
            self._add(request)
            has_changed = has_changed or before != [self._facts(key) for key in keys]
        return has_changed

    def _add(self, request: Request) -> None:
        if request.method == "LIST":
            self._prefixes.add(request.prefix)
        elif request.method == "DELETE":
            self._deleted.add(request.key)
        elif request.method == "PUT" and not request.if_absent:
            self._bodies[request.key].add(request.body)
        else:
            self._read.add(request.key)

    def _known(self) -> set[str]:
        return self._read | self._deleted | set(self._bodies)

    def _facts(self, key: str) -> tuple[int, bool, bool]:
        is_read = key in self._read or any(key.startswith(each) for each in self._prefixes)
        return len(self._bodies.get(key, ())), is_read, key in self._deleted

    def __call__(self, request: Request, objects: Objects) -> bool:
        """Return whether it makes no difference when this request is performed from now on."""
        num_bodies, is_read, is_deleted = self._facts(request.key)
        if request.method == "LIST" or is_deleted:
            return False
        if request.method == "PUT" and not request.if_absent:
            return num_bodies == 1 and not is_read
        return request.key in objects and (request.method == "PUT" or not num_bodies)


def _lists(request: Request, key: str) -> bool:
    return request.method == "LIST" and key.startswith(request.prefix)


def explore(scenario: Scenario, faults: Faults, reduce: bool = True) -> Exploration:
    """Visit every state that schedules with these faults reach, and check each.

    With `reduce`, one order stands for all that differ by requests that commute. Raises
    ViolationError with the schedule that leads to a state whose check raises AssertionError.
    """
    commutes = Commuting(scenario.machine)
    with _uncollected():
        while True:
            commutes.learn()
            found = _explore(scenario, faults, commutes if reduce else None)
            if found is not None:
                return found


@contextmanager
def _uncollected() -> Iterator[None]:
    """Look for no cyclic garbage: states have none, and looking takes a quarter of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _explore(scenario: Scenario, faults: Faults, commutes: Commuting | None) -> Exploration | None:
    """Search depth first; a state's schedules are the sum of its successors'.

    None if a new request does not commute with earlier ones, as it was thought of them.
    """
    machine, check = scenario.machine, scenario.check
    found = Exploration()
    schedules: dict[State, int] = {}
    begin = machine.initial(scenario.drivers, faults)
    path: list[tuple[State, Iterator[Action], Action | None]] = []

    def enter(state: State, by: Action | None) -> None:
        try:
            if path:
                check.check_step(path[-1][0], state)
            check.check(state)
            check.check_end(state)
        except AssertionError as error:
            actions = [action for _, _, action in path] + [by]
            schedule = [action for action in actions if action is not None]
            raise ViolationError(scenario, str(error), schedule) from error
        schedules[state] = 0
        path.append((state, _choices(machine, state, commutes), by))

    enter(begin, None)
    while path:
        state, choices, _ = path[-1]
        action = next(choices, None)
        if action is None:
            path.pop()
            schedules[state] = schedules[state] or 1  # no choice: the schedule has ended
            if path:
                schedules[path[-1][0]] += schedules[state]
            continue
        found.num_steps += 1
        after = machine.step(state, action)
        if commutes is not None and commutes.learn():
            return None
        if after in schedules:
            schedules[state] += schedules[after]
        else:
            enter(after, action)
    found.num_states, found.num_schedules = len(schedules), schedules[begin]
    return found


def _choices(machine: Machine, state: State, commutes: Commuting | None) -> Iterator[Action]:
    """Yield what can happen next; to one request alone, if it commutes with all others."""
    if commutes is not None:
        objects = machine.stores[state.store]
        for number, request in enumerate(state.underway):
            if commutes(machine.requests[request], objects):
                return iter([Action(LAND, (UNDERWAY, number))])
        for who, place in machine.running(state):
            # A refusal changes nothing but the process, so it may as well come just before this.
            if place in machine.refused or commutes(machine.request_at(place), objects):
                return (action for action in machine.actions(state) if action.who == who)
    return machine.actions(state)


def replay(scenario: Scenario, schedule: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    """Run a schedule, then all drivers to their ends; return the first violation, or "".

    Actions that are not possible when their turn comes are left out.
    """
    machine, actions = scenario.machine, [Action(*each) for each in schedule]
    state = machine.initial(scenario.drivers, Faults.of(actions))
    try:
        for action in actions:
            if action in machine.actions(state):
                state = _checked_step(scenario, state, action)
        scenario.check.check_end(state)
        while running := next(machine.running(state), None):
            state = _checked_step(scenario, state, Action(GO, running[0]))
        scenario.check.check_end(state)
    except AssertionError as error:
        return str(error)
    return ""


def shrink(scenario: Scenario, schedule: Sequence[Action]) -> tuple[Action, ...]:
    """Leave out what a failing schedule does not need: halves at first, single actions at last."""
    kept = list(schedule)
    size = len(kept)
    while size:
        for first in range(len(kept) - size, -1, -size):
            fewer = kept[:first] + kept[first + size :]
            if replay(scenario, fewer):
                kept = fewer
        size //= 2
    return tuple(kept)


def run_at_random(scenario: Scenario, faults: Faults, seed: int) -> int:
    """Run one schedule whose choices `seed` makes, to the end of all; return its number of steps.

    Raises ViolationError with the schedule, as short as it fails.
    """
    machine, chance = scenario.machine, random.Random(seed)
    state = machine.initial(scenario.drivers, faults)
    done: list[Action] = []
    try:
        while moves := _moves(machine, state, chance):
            done.append(chance.choice(moves))
            state = _checked_step(scenario, state, done[-1])
        scenario.check.check_end(state)
    except AssertionError as error:
        raise ViolationError(scenario, str(error), shrink(scenario, done)) from error
    return len(done)


def _moves(machine: Machine, state: State, chance: random.Random) -> list[Action]:
    """Return the faults that can happen, at times, and else what moves without them."""
    if any(state.budget) and chance.random() < FAULT_RATE:
        faults = [each for each in machine.actions(state) if each.what not in {GO, LAND}]
        if faults:
            return faults
    landing = [Action(LAND, (UNDERWAY, number)) for number in range(len(state.underway))]
    return [Action(GO, who) for who, _ in machine.running(state)] + landing


def _checked_step(scenario: Scenario, state: State, action: Action) -> State:
    after = scenario.machine.step(state, action)
    scenario.check.check_step(state, after)
    scenario.check.check(after)
    return after
