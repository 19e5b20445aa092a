"""Meeting in a store that has seen other starts."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from training.distributed.rendezvous import Members, rendezvous

TIME_LIMIT_S = 20.0


def start(store: dist.Store, *ranks: int, time_limit_s: float = TIME_LIMIT_S) -> list[Members]:
    """These ranks of a world of three join at once."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda rank: rendezvous(store, rank, 3, time_limit_s), ranks))


def test_all_ranks_know_the_same_members() -> None:
    """Whoever comes first, all learn every rank's process, and one prefix."""
    met = start(dist.HashStore(), 2, 0, 1)
    assert met[0] == met[1] == met[2]
    assert len({process.start for process in met[0].processes}) == 3
    assert met[0].name(1).startswith("rank 1 (host ")


def test_a_later_start_meets_by_itself() -> None:
    """Not under the first one's prefix, nor with its dead, though the store remembers both."""
    store = dist.HashStore()
    first, second, third = (start(store, 0, 1, 2)[0] for _ in range(3))
    assert len({first.prefix, second.prefix, third.prefix}) == 3
    earlier = {process.start for process in (*first.processes, *second.processes)}
    assert earlier.isdisjoint(process.start for process in third.processes)


def test_a_rank_that_is_early_does_not_take_an_earlier_start_for_its_own() -> None:
    """Ranks 1 and 2 wait, in vain, where rank 0 of theirs does not come; then it does."""
    store = dist.HashStore()
    first = start(store, 0, 1, 2)[0]
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 3 did not come within"):
        start(store, 1, 2, time_limit_s=0.2)
    assert start(store, 0, 1, 2)[0].prefix != first.prefix


@pytest.mark.parametrize("present", [(0, 1), (0, 2), (1, 2), (0,)])
def test_absent_ranks_are_named(present: tuple[int, ...]) -> None:
    """By those that came, within the time limit."""
    absent = [rank for rank in range(3) if rank not in present]
    with pytest.raises(TimeoutError, match=re.escape(f"ranks {absent} of 3 did not come")):
        start(dist.HashStore(), *present, time_limit_s=0.3)
