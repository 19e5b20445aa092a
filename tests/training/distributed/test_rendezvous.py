"""Rendezvous in a store that holds the entries of earlier starts."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from training.distributed.rendezvous import Members, rendezvous

TIME_LIMIT_S = 20.0


def start(store: dist.Store, *ranks: int, time_limit_s: float = TIME_LIMIT_S) -> list[Members]:
    """Run the rendezvous of these ranks of a world of three at the same time."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda rank: rendezvous(store, rank, 3, time_limit_s), ranks))


def test_all_ranks_know_the_same_members() -> None:
    """In any order of arrival, all ranks return every rank's process and one prefix."""
    members = start(dist.HashStore(), 2, 0, 1)
    assert members[0] == members[1] == members[2]
    assert len({process.start for process in members[0].processes}) == 3
    assert members[0].name(1).startswith("rank 1 (host ")


def test_a_later_start_has_its_own_members() -> None:
    """A later start has another prefix and other processes, though the store keeps all of them."""
    store = dist.HashStore()
    first, second, third = (start(store, 0, 1, 2)[0] for _ in range(3))
    assert len({first.prefix, second.prefix, third.prefix}) == 3
    earlier = {process.start for process in (*first.processes, *second.processes)}
    assert earlier.isdisjoint(process.start for process in third.processes)


def test_an_early_rank_does_not_take_an_earlier_start_for_its_own() -> None:
    """Ranks 1 and 2 wait in vain while their rank 0 is missing, and succeed once it comes."""
    store = dist.HashStore()
    first = start(store, 0, 1, 2)[0]
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 3 did not come within"):
        start(store, 1, 2, time_limit_s=0.2)
    assert start(store, 0, 1, 2)[0].prefix != first.prefix


@pytest.mark.parametrize("present", [(0, 1), (0, 2), (1, 2), (0,)])
def test_absent_ranks_are_named(present: tuple[int, ...]) -> None:
    """Within the time limit, the ranks that came name those that did not."""
    absent = [rank for rank in range(3) if rank not in present]
    with pytest.raises(TimeoutError, match=re.escape(f"ranks {absent} of 3 did not come")):
        start(dist.HashStore(), *present, time_limit_s=0.3)


def test_ranks_on_devices_of_two_types_are_found() -> None:
    """A host without a GPU among hosts with one: each rank learns whose device differs."""
    store = dist.HashStore()
    devices = ("cuda", "cuda", "cpu")
    with ThreadPoolExecutor() as pool:
        joined = [
            pool.submit(rendezvous, store, rank, 3, TIME_LIMIT_S, devices[rank])
            for rank in range(3)
        ]
        differences = {each.result().first_difference() for each in joined}
    (difference,) = differences
    assert re.fullmatch(r"rank 0 \(.*\) on cuda, rank 2 \(.*\) on cpu", difference)
    assert start(dist.HashStore(), 0, 1, 2)[0].first_difference() == ""
