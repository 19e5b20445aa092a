"""Learning rates: exponential decay, and newbob from its losses."""

import json
from dataclasses import asdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.algorithms.learning_rates import (
    MinRateNewbob,
    NewbobState,
    exponential_decay,
    warm_up_factor,
)


def test_decay_goes_from_initial_to_final_by_a_constant_factor() -> None:
    """Ratios of successive rates are equal; first and last are as given."""
    rates = exponential_decay(0.1, 0.001, 5)
    assert rates[0] == pytest.approx(0.1)
    assert rates[-1] == pytest.approx(0.001)
    ratios = [after / before for before, after in pairwise(rates)]
    assert ratios == pytest.approx([ratios[0]] * 4)


def test_decay_of_few_epochs_begins_at_the_initial_rate() -> None:
    """One epoch has the initial rate alone, two have both rates; equal rates are constant."""
    assert exponential_decay(0.1, 0.001, 1) == [0.1]
    assert exponential_decay(0.1, 0.001, 2) == pytest.approx([0.1, 0.001])
    assert exponential_decay(0.1, 0.1, 3) == [0.1] * 3


def rates_of(newbob: MinRateNewbob, losses: list[float]) -> list[float]:
    """Return the rate of each trained epoch if the epochs end at `losses`."""
    rates: list[float] = []
    state: NewbobState | None = newbob.begin()
    for loss in losses:
        if state is None:
            break
        rates.append(state.rate)
        state = newbob.after_epoch(state, loss)
    return rates


def test_newbob_halves_from_the_first_small_reduction_until_the_minimum() -> None:
    """The rate is halved after every epoch from the first reduction below 5 % (000 3.2)."""
    losses = [4.0, 3.0, 2.84, 2.75, 1.0, 0.2, 0.1, 0.05]  # -25 %, -5.3 %, -3.2 %, then large again
    assert rates_of(MinRateNewbob(0.8, 0.1), losses) == [0.8, 0.8, 0.8, 0.8, 0.4, 0.2]


@pytest.mark.parametrize(("loss", "rate"), [(9.49, 1.0), (9.51, 0.5)])
def test_newbobs_threshold_is_5_percent_unless_configured(loss: float, rate: float) -> None:
    """A reduction from 10 to 9.49 keeps the rate, one to 9.51 halves it (000 3.2)."""
    assert rates_of(MinRateNewbob(1.0, 0.1), [10.0, loss, 1.0])[-1] == rate


def test_newbob_keeps_the_rate_while_the_loss_falls_by_the_threshold() -> None:
    """A reduction of just 5 % is enough; one epoch alone has no reduction."""
    assert rates_of(MinRateNewbob(1.0, 0.3), [400.0, 380.0, 361.0, 300.0]) == [1.0] * 4
    assert rates_of(MinRateNewbob(1.0, 0.3), [400.0, 381.0, 1.0]) == [1.0, 1.0, 0.5]


def test_newbob_takes_a_rising_loss_as_no_reduction() -> None:
    """A rate at which the loss grows, or is 0, is not kept."""
    assert rates_of(MinRateNewbob(1.0, 0.5), [2.0, 3.0, 1.0]) == [1.0, 1.0]
    assert rates_of(MinRateNewbob(1.0, 0.5), [0.0, 0.0, 0.0]) == [1.0, 1.0]


@given(
    st.lists(st.floats(0, 1e6), min_size=60, max_size=60), st.floats(1e-3, 1.0), st.integers(1, 20)
)
def test_newbob_never_raises_the_rate_and_ends(
    losses: list[float], initial: float, num_halvings: int
) -> None:
    """After the first halving each epoch has half the rate, and so many epochs at most follow."""
    newbob = MinRateNewbob(initial, initial * 0.5**num_halvings)
    rates = rates_of(newbob, losses)
    falling = rates[rates.count(initial) - 1 :]
    assert falling == [initial * 0.5**number for number in range(len(falling))]
    assert min(rates) > newbob.minimum
    assert len(falling) <= num_halvings
    assert len(rates) == len(losses) or len(falling) == num_halvings


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20))
def test_newbob_resumes_from_its_stored_state(losses: list[float]) -> None:
    """A schedule that is written and read after every epoch equals the undisturbed one."""
    newbob = MinRateNewbob(1.0, 0.01)
    rates = []
    stored = json.dumps(asdict(newbob.begin()))
    for loss in losses:
        state = NewbobState(**json.loads(stored))
        rates.append(state.rate)
        following = newbob.after_epoch(state, loss)
        if following is None:
            break
        stored = json.dumps(asdict(following))
    assert rates == rates_of(newbob, losses)


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), -1.0])
def test_newbob_refuses_a_loss_that_is_none(loss: float) -> None:
    """Training that has diverged does not continue at half the rate."""
    newbob = MinRateNewbob(1.0, 0.1)
    with pytest.raises(ValueError, match=f"^loss = {loss}: .* diverged"):
        newbob.after_epoch(newbob.begin(), loss)


def test_the_warm_up_is_a_line_to_the_rate() -> None:
    """Shares of 1/4, 2/4, 3/4 and 1 in four steps, then 1; no step is at 0."""
    assert [warm_up_factor(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert [warm_up_factor(step, 1) for step in range(2)] == [1, 1]
    assert warm_up_factor(0, 0) == 1
