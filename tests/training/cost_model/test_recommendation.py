"""Check the recommended settings: groups within a host, blocks no larger than the link needs."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.cost_model.settings import CALIBRATION, NETWORK, WORKLOAD
from training.cost_model.step_time import CostModel, Fitted
from training.cost_model.trainer_choice import (
    BLOCK_SIZES,
    KEPT_SHARE,
    Recommendation,
    group_sizes,
    recommend,
)


def recommended(num_ranks: int, between_gbps: float, within_gbps: float = 8.0) -> Recommendation:
    """Recommend settings for links of these bandwidths."""
    network = replace(
        NETWORK, between_gbps=between_gbps, connection_gbps=between_gbps, within_gbps=within_gbps
    )
    fitted = Fitted(waiting=0.03, congestion=0.01)
    calibration = replace(CALIBRATION, network=network, fitted=fitted)
    return recommend(CostModel(WORKLOAD, calibration), num_ranks)


def test_a_slower_link_needs_larger_blocks() -> None:
    """The block grows as the link slows; groups remain as large as a host."""
    choices = [recommended(32, gbps).chosen for gbps in (10.0, 0.1, 0.01)]
    assert [choice.group_size for choice in choices] == [4, 4, 4]
    assert [choice.block_size for choice in choices] == [25, 50, 400]


def test_a_slow_link_within_the_host_needs_smaller_groups() -> None:
    """If GTC itself costs more than a tenth, ranks train alone."""
    assert recommended(32, 1.0, within_gbps=0.005).chosen.group_size == 1


@settings(max_examples=50, deadline=None)
@given(st.sampled_from([4, 8, 24, 128]), st.floats(1e-4, 100), st.floats(1e-4, 100))
def test_nine_tenths_of_the_speed_are_kept(ranks: int, between: float, within: float) -> None:
    """The choice keeps 90 % of the best speed-up, and none exceeds the best."""
    found = recommended(ranks, between, within)
    assert KEPT_SHARE * found.fastest.speed_up <= found.chosen.speed_up <= found.fastest.speed_up
    assert found.chosen.block_size in BLOCK_SIZES


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_host", "expected"),
    [
        (128, 8, [1, 2, 4, 8]),
        (24, 16, [1, 2, 4, 8]),
        (4, 8, [1, 2, 4]),
        (6, 8, [1, 2, 6]),
        (1, 8, [1]),
    ],
)
def test_groups_are_equal_and_within_a_host(
    num_ranks: int, ranks_per_host: int, expected: list[int]
) -> None:
    """Group sizes divide the ranks and the host; all ranks of one host are a group, too."""
    assert group_sizes(num_ranks, ranks_per_host) == expected
