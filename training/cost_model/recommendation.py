"""Recommend a group size and a block size: the most accurate that keep most of the speed."""

from dataclasses import dataclass

from training.cost_model.step_time import CostModel

BLOCK_SIZES = (25, 50, 100, 200, 400, 800, 1600)
"""The papers' smallest block size (000 Table 2), and repeated doublings of it."""

KEPT_SHARE = 0.9
"""The share of the fastest choice's speed that a recommendation must keep."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Choice is HTM's settings and speed-up; `group_size` 1 is BMUF, one group is GTC."""

    group_size: int
    block_size: int
    speed_up: float


@dataclass(frozen=True, slots=True)
class Recommendation:
    """Recommendation is the chosen settings and, for comparison, the fastest ones."""

    chosen: Choice
    fastest: Choice


def recommend(model: CostModel, num_ranks: int) -> Recommendation:
    """Return the largest group within a host, then the smallest block, with 90 % of the best speed.

    The group comes first: HTM in groups of 8 is more accurate at blocks of 200 than BMUF at 25
    (000 4.2). Groups across hosts are left out, because no results are published for them.
    """
    choices = [
        Choice(
            group_size,
            block_size,
            model.speed_up(num_ranks, model.htm(num_ranks, group_size, block_size)),
        )
        for group_size in group_sizes(num_ranks, model.calibration.network.ranks_per_host)
        for block_size in BLOCK_SIZES
    ]
    # Several choices are almost equally fast, so accuracy decides among those within 10 %.
    fastest = max(choices, key=lambda choice: choice.speed_up)
    kept = [choice for choice in choices if choice.speed_up >= KEPT_SHARE * fastest.speed_up]
    # Accuracy grows with the group and falls with the block (000 Tables 2 and 3).
    chosen = min(kept, key=lambda choice: (-choice.group_size, choice.block_size))
    return Recommendation(chosen, fastest)


def group_sizes(num_ranks: int, ranks_per_host: int) -> list[int]:
    """Return the sizes of equal groups of all ranks that do not span hosts."""
    return [
        size
        for size in range(1, min(num_ranks, ranks_per_host) + 1)
        if num_ranks % size == 0 and (ranks_per_host % size == 0 or size == num_ranks)
    ]
