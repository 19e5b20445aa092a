"""A NaN or an infinity is found wherever it is; values that merely add up to one are none."""

import pytest
import torch

from tests.training.fit.host_reads import look_late
from training.distributed.checks import all_finite

LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("is_on_device", [False, True])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, -2.0], True),
        ([LARGEST] * 1000, True),
        ([LARGEST, -LARGEST] * 1000, True),
        ([1.0, torch.nan], False),
        ([1.0, torch.inf], False),
        ([torch.inf, -torch.inf], False),
    ],
)
def test_finds_what_is_not_finite(
    monkeypatch: pytest.MonkeyPatch, is_on_device: bool, values: list[float], expected: bool
) -> None:
    """In any of several tensors, at once on a CPU, and by the sums that a device keeps."""
    if is_on_device:
        look_late(monkeypatch)
    tensors = [torch.ones(3), torch.tensor(values), torch.ones(2, dtype=torch.bfloat16)]
    assert bool(all_finite(tensors)) is expected
    assert bool(all_finite([torch.tensor(values)])) is expected
