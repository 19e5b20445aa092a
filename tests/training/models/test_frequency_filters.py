"""Filters over the bins of a row: convolutions, computed without any."""

import torch
from torch.nn import functional

from pipeline.filterbank import NUM_BINS, NUM_INPUTS, STACK
from training.models.lstm import FrequencyFilters
from training.settings.models import FIRST_STRIDE


def test_they_are_convolutions_and_a_projection() -> None:
    """By torch's own, whose channels are the three frames of a row; outputs are place by place."""
    torch.manual_seed(1)
    filters, rows = FrequencyFilters(5, 3), torch.randn(2, 7, NUM_INPUTS)
    first, second = (
        (each.weight.view(5, num_channels, -1), each.bias)
        for each, num_channels in ((filters.first, STACK), (filters.second, 5))
    )
    heard = functional.conv1d(rows.view(14, STACK, NUM_BINS), *first, stride=FIRST_STRIDE).relu()
    outputs = functional.conv1d(heard, *second).relu().mT.reshape(2, 7, -1)
    torch.testing.assert_close(filters(rows), filters.projection(outputs))
