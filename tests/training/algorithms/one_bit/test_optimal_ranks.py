"""Eq. (4): the optimal number of ranks, and where double buffering is of use."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from training.cost_model.step_time import MinibatchCosts

# Paper 004 5.1 and Table 1 (2048 frames): 118 us a frame, C T_post + T_upd = 18.2 ms, T_upd = 9 ms,
# T_comm^float / 32 = 10 ms.
PAPER = MinibatchCosts(
    frame=118e-6, postprocessing=9.2e-3, model_update=9e-3, exchange=0.32, compression=32.0
)


@pytest.mark.parametrize("num_frames", [1024, 2880, 16384])
def test_computation_takes_as_long_as_communication_at_the_optimum(num_frames: int) -> None:
    """Eq. (3) holds for half a minibatch at the K of eq. (4)."""
    costs = replace(PAPER, model_update=2e-3)
    optimum = costs.optimal_num_ranks(num_frames)
    assert costs.computation(num_frames / 2, optimum) == pytest.approx(costs.communication)


def test_the_papers_costs_give_its_optimum() -> None:
    """(1440 x 118 us + 9.2 ms) / (10 ms - 9 ms) is 179; in floats, without compression, 0.6."""
    assert PAPER.optimal_num_ranks(2880) == pytest.approx((0.16992 + 0.0092) / 0.001)
    floats = replace(PAPER, compression=1.0)
    assert floats.optimal_num_ranks(2880) == pytest.approx(0.17912 / 0.311)


def test_beyond_the_optimum_more_ranks_save_nothing() -> None:
    """Double buffered, a minibatch takes two exchanges from the optimum on, and more before it."""
    costs = replace(PAPER, model_update=2e-3)
    optimum = math.ceil(costs.optimal_num_ranks(2880))
    seconds = [costs.double_buffered_seconds(2880, k) for k in range(1, 3 * optimum)]
    assert seconds[optimum - 1 :] == [2 * costs.communication] * (2 * optimum)
    assert all(before > after for before, after in pairwise(seconds[:optimum]))


def test_without_a_saturated_link_double_buffering_has_no_use() -> None:
    """Section 2.3: below the fixed cost of an update, K is infinite, and one exchange is faster."""
    fast = replace(PAPER, exchange=0.1)
    assert fast.optimal_num_ranks(2880) == math.inf
    for num_ranks in (1, 8, 64):
        assert fast.double_buffered_seconds(2880, num_ranks) > fast.seconds(2880, num_ranks)
    slow = replace(PAPER, exchange=0.64)
    assert slow.double_buffered_seconds(2880, 8) < slow.seconds(2880, 8)


@pytest.mark.parametrize(
    ("name", "value", "need"),
    [("frame", 0.0, "above 0"), ("compression", math.inf, "above 0"), ("exchange", -1.0, ">= 0")],
)
def test_costs_below_zero_are_refused(name: str, value: float, need: str) -> None:
    """The message names the cost, its value and the bound."""
    with pytest.raises(ValueError, match=f"^{name} = {value}: need a finite number {need}"):
        replace(PAPER, **{name: value})
