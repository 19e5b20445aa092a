"""The link between two real ranks, as the cost model times it."""

from tests.training.trainers.ranks import RankPool
from training.cost_model.measured_rates import LinkRates, measure_link
from training.distributed.process_group import ProcessGroup


def refused(group: ProcessGroup) -> str:
    """Return the error that three or more ranks get."""
    try:
        measure_link(group)
    except ValueError as error:
        return str(error)
    return ""


def test_two_ranks_time_their_link(rank_pool: RankPool) -> None:
    """Loopback: less than a second an exchange, more than a megabit a second, on both."""
    for rates in rank_pool.run(2, measure_link):
        assert isinstance(rates, LinkRates)
        assert rates.latency_us < 1e6
        assert rates.gbps > 1e-3


def test_a_link_has_two_ends(rank_pool: RankPool) -> None:
    """Other numbers of ranks are refused before anything is sent."""
    assert rank_pool.run(4, refused) == ["4 ranks: need 2, one at each end of the link"] * 4
