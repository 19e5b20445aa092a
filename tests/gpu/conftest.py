"""The GPU of these tests, which `make gpu` runs on a machine that has one."""

import pytest
import torch

from training.models.precision import set_float32_products


@pytest.fixture
def gpu() -> torch.device:
    """The first GPU, with products of float32 numbers in float32; without one a test fails."""
    assert torch.cuda.is_available(), f"torch {torch.__version__} sees no CUDA device"
    set_float32_products("float32")
    return torch.device("cuda", 0)
