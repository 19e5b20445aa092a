"""Training steps on a GPU: graphs, precision, the layout of weights, what a host waits for."""

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from pipeline.filterbank import NUM_INPUTS
from tests.gpu.small_training import FRAMES, NUM_CHUNKS, minibatch, relative_error, student
from tests.training.training_settings import training_settings
from training.distributed.checks import all_finite
from training.fit.steps import GradientGraphs, GradientNorms, compute_gradients, take_steps
from training.models.precision import set_float32_products
from training.settings.model_training import Precision

pytestmark = pytest.mark.gpu

CONFIG = training_settings(minibatch_frames=NUM_CHUNKS * FRAMES, max_gradient_norm=0.5)
NUM_STEPS = 12
Trained = tuple[list[tuple[float, float]], list[Tensor]]


def trained(
    device: torch.device, has_graphs: bool, precision: Precision = "float32", dropout: float = 0.0
) -> Trained:
    """Each step's loss and correct frames, and the weights; every fourth step has soft targets."""
    model, config = student(device, dropout), replace(CONFIG, precision=precision)
    model.train()
    torch.manual_seed(2)
    compute = partial(compute_gradients, model, config)
    if has_graphs:
        compute = GradientGraphs(model, compute, (NUM_CHUNKS, FRAMES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = [minibatch(number, device, number % 4 == 3) for number in range(NUM_STEPS)]
    steps = take_steps(
        model, optimizer, iter(given), NUM_STEPS, config, GradientNorms(0, 0), compute
    )
    totals = [(float(each.cross_entropy), float(each.num_correct)) for each in list(steps)]
    return totals, [each.detach().cpu() for each in model.parameters()]


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_graphs_make_the_bits_of_steps_without(gpu: torch.device, precision: Precision) -> None:
    """Losses, correct frames and weights, with both kinds of target by turns."""
    set_float32_products(precision)
    plain, graphs = (trained(gpu, each, precision) for each in (False, True))
    assert graphs[0] == plain[0]
    assert all(map(torch.equal, graphs[1], plain[1]))


@pytest.mark.parametrize("has_graphs", [False, True])
def test_steps_repeat_to_the_bit(gpu: torch.device, has_graphs: bool) -> None:
    """Dropout between layers included, once this process has drawn cuDNN's random numbers."""
    first, second = (trained(gpu, has_graphs) for _ in range(2))
    assert first[0] == second[0]
    assert all(map(torch.equal, first[1], second[1]))


@pytest.mark.parametrize(
    ("precision", "bound"), [("float32", 1e-5), ("tf32", 3e-3), ("bfloat16", 3e-2)]
)
def test_gradients_are_the_cpus(gpu: torch.device, precision: Precision, bound: float) -> None:
    """Within the rounding of each precision; TF32 and bfloat16 are really used."""
    gradients = []
    for device in (torch.device("cpu"), gpu):
        set_float32_products(precision)
        model = student(device)
        config = replace(CONFIG, precision="float32" if device.type == "cpu" else precision)
        compute_gradients(model, config, minibatch(0, device, is_soft=True))
        gradients.append(torch.cat([each.grad.flatten().cpu() for each in model.parameters()]))
    error = relative_error(gradients[1], gradients[0])
    assert error < bound
    assert precision == "float32" or error > bound / 100


def test_every_replay_draws_other_masks(gpu: torch.device) -> None:
    """A graph of a model with dropout makes another loss of the same minibatch each time."""
    model = student(gpu, dropout=0.3).train()
    compute = GradientGraphs(model, partial(compute_gradients, model, CONFIG), (NUM_CHUNKS, FRAMES))
    given = minibatch(0, gpu, is_soft=False)
    losses = [float(compute(given)[0].cross_entropy) for _ in range(8)]
    assert len(set(losses)) == len(losses)


@pytest.mark.parametrize("has_graphs", [False, True])
def test_cudnn_copies_no_weights(gpu: torch.device, has_graphs: bool) -> None:
    """torch warns where an LSTM's weights no longer lie in one piece."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(gpu, has_graphs)
        trained(gpu, has_graphs, "bfloat16")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_teachers_logits_of_padded_utterances_are_the_cpus(
    gpu: torch.device, precision: Precision
) -> None:
    """A bidirectional model's, which packs them on a GPU and reverses them on a CPU."""
    generator = torch.Generator().manual_seed(0)
    utterances = [torch.randn(length, NUM_INPUTS, generator=generator) for length in (90, 7, 1, 40)]
    expected = student(torch.device("cpu"), bidirectional=True).eval().utterance_logits(utterances)
    model = student(gpu, bidirectional=True).eval()
    found = model.utterance_logits([each.to(gpu) for each in utterances], precision)
    bound = 1e-5 if precision == "float32" else 3e-2
    for mine, other in zip(found, expected, strict=True):
        assert relative_error(mine, other) < bound


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("sizes", [[1], [3, 70_000, 1], [25_000_000]])
def test_whatever_is_not_finite_is_found(gpu: torch.device, value: float, sizes: list[int]) -> None:
    """First or last in any tensor; the largest finite numbers, whose sum overflows, are finite."""
    tensors = [torch.full((size,), torch.finfo(torch.float32).max, device=gpu) for size in sizes]
    assert all_finite([*tensors, torch.empty(0, device=gpu)])
    for tensor in tensors:
        for place in (0, -1):
            kept = tensor[place].clone()
            tensor[place] = value
            assert not all_finite(tensors)
            tensor[place] = kept
