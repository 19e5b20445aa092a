"""Fit rates to a link's times, time a real link, and a rank's work on GTC's messages."""

import numpy as np
import pytest
import torch

from tests.training.trainers.ranks import RankPool
from training.cost_model import measured_rates
from training.cost_model.measured_rates import LinkRates, fit_link, measure_link, measure_messages


def test_a_links_rates_follow_from_its_times() -> None:
    """The fit finds 50 us and 25 Gbps, also if each time is off by up to a tenth."""
    num_bytes = [4.0 * 8**power for power in range(8)]
    exact = [50e-6 + 8e-9 * each / 25 for each in num_bytes]
    rates = fit_link(num_bytes, exact)
    assert (rates.latency_us, rates.gbps) == pytest.approx((50, 25))
    noise = np.random.default_rng(0).uniform(0.9, 1.1, len(exact))
    noisy = fit_link(num_bytes, list(np.array(exact) * noise))
    assert (noisy.latency_us, noisy.gbps) == pytest.approx((50, 25), rel=0.1)


def test_times_that_do_not_grow_are_refused() -> None:
    """Times that shrink with the message raise an error instead of a negative rate."""
    with pytest.raises(ValueError, match="too busy to time a link"):
        fit_link([4.0, 4e3, 4e6], [3e-3, 2e-3, 1e-3])


def test_messages_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both rates are positive, and encoding is faster than one element a microsecond."""
    monkeypatch.setattr(measured_rates, "NUM_ELEMENTS", 2**16)
    rates = measure_messages(0.01, torch.device("cpu"))
    assert rates.encoded_elements_per_s > 1e6
    assert rates.decoded_words_per_s > 0


@pytest.mark.parametrize("density", [0.0, 1.0])
def test_densities_that_have_no_threshold_are_refused(density: float) -> None:
    """Densities of 0 and 1 are refused: no finite threshold of a normal gradient gives them."""
    with pytest.raises(ValueError, match=r"density = .*: need more than 0, less than 1"):
        measure_messages(density, torch.device("cpu"))


def test_two_ranks_time_their_link(rank_pool: RankPool) -> None:
    """Loopback: less than a second an exchange, more than a megabit a second, on both."""
    for rates in rank_pool.run(2, measure_link):
        assert isinstance(rates, LinkRates)
        assert rates.latency_us < 1e6
        assert rates.gbps > 1e-3


def test_a_link_has_two_ends(rank_pool: RankPool) -> None:
    """Other numbers of ranks are refused before anything is sent."""
    refusal = "4 ranks: need 2, one at each end of the link"
    assert rank_pool.errors(4, measure_link) == [refusal] * 4
