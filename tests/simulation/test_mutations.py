"""Errors planted into the commit protocol are found, and their schedules replay."""

from collections.abc import Callable, Sequence

import pytest

from tests.simulation.exploration import (
    Scenario,
    ViolationError,
    explore,
    replay,
    run_at_random,
    shrink,
)
from tests.simulation.mutations import (
    MUTATIONS,
    MUTATIONS_OF_PARTS,
    Patch,
    lost_answer_is_a_failure,
    manifest_replaced,
)
from tests.simulation.properties import Properties
from tests.simulation.schedules import Faults
from tests.simulation.simulated_s3 import simulated_network
from tests.simulation.simulated_step import Recipe, set_bounds_of_two_tasks

RECIPES = (Recipe(20), Recipe(21))

SEARCHES = (
    (0, (0, 1), Faults(crashes=1, lost=1)),
    (2, (0, 1), Faults()),
    (2, (0, 0), Faults(crashes=1, lost=1)),
    (2, (0, 0), Faults(crashes=1, altered=1)),
    (2, (0, 1), Faults(crashes=1, lost=1, busy=1)),
)
"""Numbers of tasks, drivers' recipes and faults, the quickest to explore first."""


@pytest.fixture(autouse=True)
def network():
    with simulated_network():
        yield


def search(
    scenarios: Sequence[tuple[int, tuple[int, ...], Faults]],
) -> tuple[Scenario, ViolationError | None]:
    """Explore one scenario after the other, up to the first violation."""
    for num_tasks, drivers, faults in scenarios:
        scenario = Properties(RECIPES, num_tasks).scenario(*drivers)
        try:
            explore(scenario, faults)
        except ViolationError as violation:
            return scenario, violation
    return scenario, None


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_a_planted_error_is_found(mutation: Callable[[Patch], None], monkeypatch: Patch) -> None:
    """By a schedule of at most 24 actions, which fails again when it is replayed."""
    mutation(monkeypatch)
    scenario, violation = search(SEARCHES)
    assert violation is not None
    short = shrink(scenario, violation.schedule)
    assert len(short) <= 24
    assert replay(scenario, short)
    print(ViolationError(scenario, replay(scenario, short), short))


SEARCHES_OF_PARTS = (
    ((0, 0), Faults()),
    ((0, 1), Faults()),
    ((0,), Faults(crashes=1)),
    ((0, 0), Faults(crashes=1)),
)


@pytest.mark.parametrize("mutation", MUTATIONS_OF_PARTS, ids=lambda mutation: mutation.__name__)
def test_a_planted_error_of_folded_commits_is_found(
    mutation: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    """By one of the schedules of two tasks that count as many."""
    set_bounds_of_two_tasks(monkeypatch)
    mutation(monkeypatch)
    found = []
    for drivers, faults in SEARCHES_OF_PARTS:
        try:
            explore(Properties(RECIPES, 2, True).scenario(*drivers), faults)
        except (AssertionError, ViolationError) as violation:
            found.append(str(violation))
            break
    assert found
    assert "the same answers led to" not in found[0]


EVALUATIONS = [("go", (driver,)) for driver in (0, 0, 1, 1)]
LOST_COMMIT = [*3 * [("go", (0,))], *3 * [("go", (0, 1))], ("lose the answer", (0, 1))]


def test_a_stored_schedule_replays(monkeypatch: Patch) -> None:
    """Two evaluations find no manifest before either stores one; a commit's answer is lost."""
    for mutation, num_tasks, drivers, schedule, violation in (
        (manifest_replaced, 0, (0, 1), EVALUATIONS, "manifest.json was replaced"),
        (lost_answer_is_a_failure, 2, (0,), LOST_COMMIT, "task 000001 was committed before"),
    ):
        assert replay(Properties(RECIPES, num_tasks).scenario(*drivers), schedule) == ""
        with monkeypatch.context() as patch:
            mutation(patch)
            scenario = Properties(RECIPES, num_tasks).scenario(*drivers)
            assert violation in replay(scenario, schedule)


def test_a_random_schedule_that_fails_is_short(monkeypatch: Patch) -> None:
    """The message lists its actions, and the call that replays them."""
    lost_answer_is_a_failure(monkeypatch)
    scenario = Properties(RECIPES, 2).scenario(0)
    shown = r"(?s)after:.*\n  lose the answer: driver 0 task .*\nreplay\(Properties\("
    with pytest.raises(ViolationError, match=shown) as caught:
        random_schedules(scenario, Faults(lost=1), 200)
    assert len(caught.value.schedule) < 12


def random_schedules(scenario: Scenario, faults: Faults, number: int) -> None:
    for seed in range(number):
        run_at_random(scenario, faults, seed)
