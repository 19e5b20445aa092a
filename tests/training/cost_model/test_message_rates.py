"""Time a rank's work on GTC's messages in the trainer's own code."""

import pytest
import torch

from training.cost_model import measured_rates
from training.cost_model.measured_rates import measure_messages


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
