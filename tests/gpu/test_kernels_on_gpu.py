"""GTC's kernels make the CPU's bits on a GPU, and the k best are a host's."""

import numpy as np
import pytest
import torch
from torch import Tensor

from pipeline.filterbank import NUM_INPUTS
from pipeline.kbest import KBest, select_kbest
from tests.benchmarks.gtc_task import GtcTask
from tests.gpu.small_training import student
from training.algorithms.gtc import encoding
from training.algorithms.gtc.encoding import add_message, num_map_words
from training.targets.teacher import select_on_device

pytestmark = pytest.mark.gpu

NUM_ELEMENTS = 3_000_001
DENSITIES = [1e-4, 1e-3, 0.06, 0.3]


def take_on_gpu(task: GtcTask, capacity: int) -> Tensor:
    from training.algorithms.gtc import cuda_encoding  # noqa: PLC0415 - others interpret it

    threshold = task.residual.new_tensor(task.gradient_threshold)
    first_block = torch.zeros((), dtype=torch.int32, device=task.residual.device)
    return cuda_encoding.take_message(
        task.residual, task.gradients, threshold, capacity, first_block
    )


@pytest.mark.parametrize("density", DENSITIES)
@pytest.mark.parametrize("num_elements", [1, 31, 8193, NUM_ELEMENTS])
def test_messages_and_residuals_are_the_cpus(
    gpu: torch.device, num_elements: int, density: float
) -> None:
    """Over ten steps of one residual, in both encodings; eight messages add up to the same."""
    from training.algorithms.gtc import cuda_encoding  # noqa: PLC0415 - as above

    task = GtcTask.of(num_elements, density, gpu)
    residual, gradients = task.residual.cpu().clone(), task.gradients.cpu()
    for _ in range(10):
        expected = encoding.take_message(residual, gradients, task.gradient_threshold)
        message = take_on_gpu(task, num_map_words(num_elements))
        assert torch.equal(message[: len(expected)].cpu(), expected)
        assert torch.equal(task.residual.cpu(), residual)
        counts = torch.zeros(num_elements, dtype=torch.int32, device=gpu)
        cuda_encoding.add_messages(counts, message.expand(8, -1).contiguous())
        expected_counts = torch.zeros(num_elements, dtype=torch.int32)
        add_message(expected_counts, expected)
        assert torch.equal(counts.cpu(), 8 * expected_counts)


@pytest.mark.parametrize("density", DENSITIES)
def test_programs_do_not_race(gpu: torch.device, density: float) -> None:
    """A hundred runs over the same residual and gradients make the same bits."""
    task = GtcTask.of(NUM_ELEMENTS, density, gpu)
    before = task.residual.clone()
    found = set()
    for _ in range(100):
        task.residual.copy_(before)
        message = take_on_gpu(task, num_map_words(NUM_ELEMENTS))
        sent = message[: 2 + min(int(message[1]), num_map_words(NUM_ELEMENTS))]
        found.add((sent.cpu().numpy().tobytes(), task.residual.cpu().numpy().tobytes()))
    assert len(found) == 1


@pytest.mark.parametrize("num_senones", [9, 3183, 65_536])
def test_selects_what_the_host_does(gpu: torch.device, num_senones: int) -> None:
    """Senones and logits to the bit, with many ties; log Z within float16's last place."""
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(500, num_senones, generator=generator) * 16).round() / 4
    k = min(20, num_senones)
    expected = select_kbest(logits.numpy(), k)
    (found,) = select_on_device([logits.to(gpu)], k)
    assert isinstance(found, KBest)
    np.testing.assert_array_equal(found.senones, expected.senones)
    np.testing.assert_array_equal(found.logits, expected.logits)
    np.testing.assert_allclose(found.log_z, expected.log_z, rtol=1e-3, atol=1e-6)


def test_bfloat16_keeps_most_of_the_k_best(gpu: torch.device) -> None:
    """Of a random model's 20 best of 300, whose logits are close, 19 in 20 are float32's."""
    frames = torch.randn(200, NUM_INPUTS, generator=torch.Generator().manual_seed(0)).to(gpu)
    model = student(gpu, bidirectional=True).eval()
    chosen = [
        next(select_on_device(list(model.utterance_logits([frames], each)), 20))
        for each in ("float32", "bfloat16")
    ]
    one, other = (np.sort(each.senones, axis=1) for each in chosen)
    shares = [np.isin(mine, theirs).mean() for mine, theirs in zip(one, other, strict=True)]
    assert np.mean(shares) > 0.95
