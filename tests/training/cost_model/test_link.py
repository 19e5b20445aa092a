"""How a link's times become its rates; tests/training/trainers times a real one."""

import numpy as np
import pytest

from training.cost_model.link import fit_link


def test_a_links_rates_follow_from_its_times() -> None:
    """50 us and 25 Gbps come back, also where each time is off by up to a tenth."""
    num_bytes = [4.0 * 8**power for power in range(8)]
    exact = [50e-6 + 8e-9 * each / 25 for each in num_bytes]
    rates = fit_link(num_bytes, exact)
    assert (rates.latency_us, rates.gbps) == pytest.approx((50, 25))
    noise = np.random.default_rng(0).uniform(0.9, 1.1, len(exact))
    noisy = fit_link(num_bytes, list(np.array(exact) * noise))
    assert (noisy.latency_us, noisy.gbps) == pytest.approx((50, 25), rel=0.1)


def test_times_that_do_not_grow_are_refused() -> None:
    """A machine too busy to time anything says so."""
    with pytest.raises(ValueError, match="too busy to time a link"):
        fit_link([4.0, 4e3, 4e6], [3e-3, 2e-3, 1e-3])
