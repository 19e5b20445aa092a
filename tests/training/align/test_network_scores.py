"""A network scores utterances where it lies: on torch's meta device all is there but the result."""

import numpy as np
import pytest
import torch

from pipeline.shards import FeatureRow
from training.align.network_alignment import log_likelihoods
from training.models.lstm import LstmModel
from training.models.store import TrainedModel
from training.settings.models import LstmConfig

META = torch.device("meta")
NUM_SENONES = 4


@pytest.mark.parametrize("bidirectional", [False, True])
def test_only_scores_leave_the_models_device(
    monkeypatch: pytest.MonkeyPatch, bidirectional: bool
) -> None:
    """Features come to the device; an operation on tensors of two devices would fail."""
    config = LstmConfig(1, 8, bidirectional, look_ahead=0 if bidirectional else 2, dropout=0.0)
    model = LstmModel(config, NUM_SENONES).eval()
    trained = TrainedModel(model, torch.zeros(NUM_SENONES)).to(META)
    features = [np.ones((length, 64), np.float16) for length in (30, 12)]
    rows = [
        FeatureRow(f"u{n}", "s", 900, "", "", "", "a", None, each)
        for n, each in enumerate(features)
    ]
    left = []

    def leave(values: torch.Tensor) -> torch.Tensor:
        if values.is_floating_point():  # not the indices of packing
            left.append(values.device)
        return torch.zeros(values.shape, dtype=values.dtype)

    monkeypatch.setattr(torch.Tensor, "cpu", leave)
    scores = log_likelihoods(rows, trained, 1.0)
    assert [each.shape for each in scores] == [(10, NUM_SENONES), (4, NUM_SENONES)]
    assert left == [META, META]
