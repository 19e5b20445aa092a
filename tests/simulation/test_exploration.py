"""All schedules of a step's drivers keep the properties of the commit protocol."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import pytest

from infra.store import s3
from tests.simulation import schedules
from tests.simulation.exploration import Exploration, Scenario, explore, run_at_random
from tests.simulation.properties import Properties
from tests.simulation.replayed_code import Outcome, run_code
from tests.simulation.schedules import Faults, Machine, State
from tests.simulation.simulated_s3 import (
    BUCKET,
    Objects,
    Request,
    SimulatedStore,
    perform,
    simulated_network,
)
from tests.simulation.simulated_step import Recipe, set_bounds_of_two_tasks

RECIPES = (Recipe(20), Recipe(21))
SAME, OTHER = (0, 0), (0, 1)
DEVICES = (Recipe(20, "one GPU"), Recipe(20, "another GPU"))


@pytest.fixture(autouse=True)
def network():
    with simulated_network():
        yield


def explore_all(
    drivers: tuple[int, ...],
    num_tasks: int,
    faults: Faults,
    recipes: tuple[Recipe, ...] = RECIPES,
    has_many: bool = False,
) -> Exploration:
    found = explore(Properties(recipes, num_tasks, has_many).scenario(*drivers), faults)
    print(f"{drivers} of {recipes} with {num_tasks} tasks and {faults}: {found}")
    assert found.num_schedules > 1000
    return found


@pytest.mark.parametrize(
    ("drivers", "num_tasks", "faults"),
    [
        (SAME, 0, Faults(crashes=2, lost=1, busy=1)),
        (OTHER, 0, Faults(crashes=2, lost=1, busy=1)),
        (SAME, 2, Faults(crashes=2)),
        (OTHER, 2, Faults(crashes=1)),
    ],
)
def test_all_schedules(drivers: tuple[int, ...], num_tasks: int, faults: Faults) -> None:
    """Two drivers of one recipe or of two, with a step of no tasks and with one of two."""
    explore_all(drivers, num_tasks, faults)


def test_all_schedules_on_devices_that_differ() -> None:
    """Each task's first commit is taken, whichever device made it, and no driver fails."""
    explore_all(OTHER, 2, Faults(crashes=1), DEVICES)


@pytest.mark.parametrize("drivers", [SAME, OTHER])
def test_all_schedules_of_folded_commits(
    drivers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two tasks count as many: tasks fold their commits, and the manifest has two parts."""
    set_bounds_of_two_tasks(monkeypatch)
    explore_all(drivers, 2, Faults(crashes=1), has_many=True)


@pytest.mark.parametrize("drivers", [SAME, OTHER])
def test_all_schedules_with_late_and_altered_answers(drivers: tuple[int, ...]) -> None:
    """A write that takes effect after its sender has given it up; bytes that change on the way."""
    explore_all(drivers, 1, Faults(crashes=1, lost=1, late=1, altered=1))


@pytest.mark.chaos
@pytest.mark.parametrize("drivers", [SAME, OTHER])
def test_all_schedules_of_two_crashes_and_more(drivers: tuple[int, ...]) -> None:
    """Two drivers, two tasks, two crashes, a lost answer and a 503: two million states in all."""
    found = explore_all(drivers, 2, Faults(crashes=2, lost=1, busy=1))
    assert found.num_states > 200_000


def run_random_schedules(num_schedules: int) -> None:
    properties = Properties(RECIPES, 4)
    scenarios = [properties.scenario(*drivers) for drivers in ((0, 0, 0), (0, 0, 1))]
    faults = Faults(crashes=4, busy=3, lost=3, late=2, altered=2)
    steps = sum(
        run_at_random(scenarios[seed % len(scenarios)], faults, seed)
        for seed in range(num_schedules)
    )
    print(f"{num_schedules} schedules of {steps / num_schedules:.0f} steps")
    assert steps > 40 * num_schedules


def test_random_schedules() -> None:
    """Three drivers of four tasks, with fourteen faults: seeds make the choices."""
    run_random_schedules(40)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_many_random_schedules(request: pytest.FixtureRequest) -> None:
    """--schedules N are run.

    Requests and outcomes are complete after 1,000, and later ones reach ever fewer new places in
    the code: 2,850 with the first 1,000, 600 with the sixth.
    """
    run_random_schedules(request.config.getoption("--schedules"))


@dataclass
class Ends:
    """Checks nothing; holds how schedules end: the store, and the drivers' outcomes."""

    machine: Machine
    found: set[tuple[int, tuple[str, ...]]] = field(default_factory=set)

    def check(self, state: State) -> None:
        pass

    def check_step(self, before: State, after: State) -> None:
        pass

    def check_end(self, state: State) -> None:
        if not any(self.machine.actions(state)):
            outcomes = (self.machine.outcomes[driver.place] for driver in state.drivers)
            self.found.add((state.store, tuple(map(str, outcomes))))


@pytest.mark.parametrize(("num_tasks", "winners"), [(0, {1}), (2, {0, 1})])
def test_one_of_two_recipes_wins(num_tasks: int, winners: set[int]) -> None:
    """In a step of tasks none does, if each recipe has committed a task before the other did.

    Both drivers then say which task, and that a fresh --run is needed.
    """
    machine = Properties(RECIPES, num_tasks).machine
    ends = Ends(machine)
    explore(Scenario(machine, ends, OTHER), Faults(crashes=1))
    successes = [
        sum(outcome.startswith("StepResult") for outcome in outcomes) for _, outcomes in ends.found
    ]
    assert set(successes) == winners


@pytest.mark.parametrize(
    ("drivers", "faults"), [(SAME, Faults(crashes=1)), (OTHER, Faults(busy=1, lost=1, late=1))]
)
def test_orders_that_are_left_out_make_no_difference(
    drivers: tuple[int, ...], faults: Faults
) -> None:
    """Without the reduction there are more states and schedules, and the same ends."""
    machine = Properties(RECIPES, 1).machine
    reduced, whole = Ends(machine), Ends(machine)
    few = explore(Scenario(machine, reduced, drivers), faults)
    all_orders = explore(Scenario(machine, whole, drivers), faults, reduce=False)
    assert few.num_states < all_orders.num_states
    assert few.num_schedules < all_orders.num_schedules / 100
    assert reduced.found == whole.found
    assert len(whole.found) > 1 or drivers == SAME


def checks() -> str:
    folder = f"s3://{BUCKET}/run/steps/store_check"
    SimulatedStore((folder,)).check(folder)
    return "checked"


def without_condition(objects: Objects, request: Request) -> tuple[Objects, Outcome]:
    """Perform a request as a store does that ignores If-None-Match."""
    return perform(objects, replace(request, if_absent=False))


@pytest.mark.parametrize(
    ("performed", "outcome"), [(perform, "'checked'"), (without_condition, "StoreError: .*ignores")]
)
def test_all_schedules_of_a_stores_check(
    performed: Callable[[Objects, Request], tuple[Objects, Outcome]],
    outcome: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two drivers at once, lost and late writes: S3 always passes, and such a store never does."""
    monkeypatch.setattr(schedules, "perform", performed)
    monkeypatch.setattr(s3, "NUM_RACES", 0)  # real servers run the races, which need threads
    machine = Machine([checks])
    ends = Ends(machine)
    explore(Scenario(machine, ends, (0, 0)), Faults(lost=1, late=1))
    for _, outcomes in ends.found:
        assert all(re.match(outcome, each) for each in outcomes), outcomes
    assert ends.found


def writes(name: str) -> None:
    for number in range(3):
        SimulatedStore((f"s3://{BUCKET}",)).put(f"s3://{BUCKET}/{name}/{number}", b"")


def test_schedules_are_counted() -> None:
    """Two times three writes have 20 orders and 16 states; one order stands for all."""
    machine = Machine([partial(writes, "a"), partial(writes, "b")])
    scenario = Scenario(machine, Ends(machine), (0, 1))
    assert explore(scenario, Faults(), reduce=False) == Exploration(16, 24, 20)
    assert explore(scenario, Faults()) == Exploration(7, 6, 1)


def test_code_that_does_not_repeat_itself_is_noticed() -> None:
    """The exploration would be of no code at all."""
    names = iter("abcdef")
    point = run_code(lambda: writes(next(names)))
    with pytest.raises(AssertionError, match=r"the same answers led to .*b/0.*, before to .*a/0"):
        point.resume(run_code(lambda: None).outcome)
