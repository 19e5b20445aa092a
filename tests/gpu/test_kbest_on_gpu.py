"""The k best as a GPU selects them, and a teacher behind a GPU's server."""

import numpy as np
import pytest
import torch

from pipeline.kbest import KBest, select_kbest
from tests.gpu.small_training import student
from training.targets.teacher_messages import select_on_device

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("num_senones", [9, 3183, 65_536])
def test_selects_what_the_host_does(gpu: torch.device, num_senones: int) -> None:
    """Senones and logits to the bit, with many ties; log Z within float16's last place."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(500, num_senones, generator=generator) * 16).round() / 4
    k = min(20, num_senones)
    expected = select_kbest(logits.numpy(), k)
    (found,) = select_on_device([logits.to(gpu)], k).on_host()
    assert isinstance(found, KBest)
    np.testing.assert_array_equal(found.senones, expected.senones)
    np.testing.assert_array_equal(found.logits, expected.logits)
    np.testing.assert_allclose(found.log_z, expected.log_z, rtol=1e-3, atol=1e-6)


def test_bfloat16_keeps_most_of_the_k_best(gpu: torch.device) -> None:
    """Of a random model's 20 best of 300, whose logits are close, 19 in 20 are float32's."""
    frames = torch.randn(200, 192, generator=torch.Generator().manual_seed(0)).to(gpu)
    model = student(gpu, bidirectional=True).eval()
    chosen = [
        next(select_on_device(list(model.utterance_logits([frames], each)), 20).on_host())
        for each in ("float32", "bfloat16")
    ]
    one, other = (np.sort(each.senones, axis=1) for each in chosen)
    shares = [np.isin(mine, theirs).mean() for mine, theirs in zip(one, other, strict=True)]
    assert np.mean(shares) > 0.95
