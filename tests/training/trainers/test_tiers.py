"""Groups from hosts: how two tiers are divided where the user gives no group size."""

import platform
from itertools import cycle

import pytest
from torch.distributed import ProcessGroup

from tests.training.trainers.ranks import RankPool, sgd, small_model
from training.distributed.simulated_group import simulate_ranks
from training.trainers import Htm


def group_size(group: ProcessGroup) -> int:
    model = small_model()
    settings = {"block_size": 2, "gradient_threshold": 1.0}
    return Htm(model, sgd(model), group=group, **settings).config.group_size


def test_a_host_is_a_group(rank_pool: RankPool) -> None:
    """Ranks of one host form one group."""
    assert rank_pool.run(4, group_size) == [4] * 4


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [("aabbcc", 2), ("aaabbb", 3), ("abcdef", 1)],
)
def test_hosts_are_groups(hosts: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many ranks as each host has, where hosts follow each other."""
    names = cycle(hosts)
    monkeypatch.setattr(platform, "node", lambda: next(names))
    assert simulate_ranks(6, group_size) == [expected] * 6


@pytest.mark.parametrize("hosts", ["aaaabb", "ababab", "aabbca"])
def test_refuses_uneven_hosts(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts with different numbers of ranks, or mixed ones, are named with the remedy."""
    names = cycle(hosts)
    monkeypatch.setattr(platform, "node", lambda: next(names))
    with pytest.raises(ValueError, match=r"need equally many on each host.*or give group_size"):
        simulate_ranks(6, group_size)
