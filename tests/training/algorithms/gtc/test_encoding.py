"""Compare messages of the CPU and of the GPU's kernels with a plain reference."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.training.algorithms.gtc.interpreted import cuda_encoding as on_gpu
from training.algorithms.gtc import encoding as on_cpu
from training.algorithms.gtc.encoding import HEADER_WORDS, Encoding, add_message, num_map_words

SIZES = [1, 31, 64, 170, 8192, 8193, 20_000]
DENSITIES = [0.0, 1e-3, 0.05, 0.07, 0.4, 1.0]


@dataclass(frozen=True)
class Step:
    """Step computes one step by the equations, in operations on whole tensors."""

    signs: Tensor
    residual: Tensor

    @classmethod
    def of(cls, residual: Tensor, gradients: Tensor, tau: float) -> "Step":
        total = residual + gradients
        signs = torch.where(total.abs() >= tau, total.sign(), 0)
        return cls(signs, torch.where(signs == 0, total, total - signs * tau))

    def body(self) -> list[int]:
        """Return the message's words after its header."""
        sent = self.signs.nonzero().squeeze(1).tolist()
        if len(sent) <= num_map_words(len(self.signs)):
            return [index - 2**31 if self.signs[index] < 0 else index for index in sent]
        return plane_words(self.signs != 0) + plane_words(self.signs < 0)


def plane_words(plane: Tensor) -> list[int]:
    rows = torch.nn.functional.pad(plane.long(), (0, -len(plane) % 32)).view(-1, 32)
    words = (rows << torch.arange(32)).sum(1)
    return torch.where(words < 2**31, words, words - 2**32).tolist()


def signs_of(message: Tensor, num_elements: int) -> Tensor:
    counts = torch.zeros(num_elements, dtype=torch.int32)
    add_message(counts, message)
    return counts


def take_on_gpu(
    residual: Tensor, gradients: Tensor, tau: float, capacity: int, first_block: Tensor
) -> Tensor:
    return on_gpu.take_message(residual, gradients, residual.new_tensor(tau), capacity, first_block)


def first_block_zero() -> Tensor:
    return torch.tensor(0, dtype=torch.int32)


def at_density(
    num_elements: int, density: float, seed: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, float]:
    """Return a residual, gradients, and the threshold that about this share of their sums reach."""
    generator = torch.Generator().manual_seed(seed)
    residual, gradients = torch.randn(2, num_elements, generator=generator, dtype=dtype)
    reached = (residual + gradients).abs().quantile(1 - density)
    # A threshold of 0 sends no messages, and the smallest of 20,000 sums can be 0.
    return residual, gradients, max(float(reached), 1e-6) if density else 100.0


cases = st.builds(
    at_density,
    st.sampled_from(SIZES),
    st.sampled_from(DENSITIES),
    st.integers(0, 2**32),
    st.sampled_from([torch.float32, torch.float64]),
)


@given(cases)
@settings(deadline=None)
def test_messages_are_the_equations(case: tuple[Tensor, Tensor, float]) -> None:
    """The sent words and the residual equal the plain reference's bit for bit."""
    residual, gradients, tau = case
    expected = Step.of(residual, gradients, tau)
    message = on_cpu.take_message(residual, gradients, tau)
    assert message[HEADER_WORDS:].tolist() == expected.body()
    assert message[1] == expected.signs.count_nonzero()
    assert torch.equal(residual, expected.residual)
    assert torch.equal(signs_of(message, len(residual)), expected.signs.int())


@given(cases)
@settings(max_examples=30, deadline=None)
def test_gpu_messages_are_those_of_the_cpu(case: tuple[Tensor, Tensor, float]) -> None:
    """With room for a map the kernels make the same words, residuals and counts."""
    assert_gpu_is_cpu(*case)


def assert_gpu_is_cpu(residual: Tensor, gradients: Tensor, tau: float) -> None:
    kept = residual.clone()
    message = on_cpu.take_message(kept, gradients, tau)
    fixed = take_on_gpu(residual, gradients, tau, num_map_words(len(residual)), first_block_zero())
    assert torch.equal(fixed[: len(message)], message)
    assert torch.equal(residual, kept)
    counts = torch.zeros(len(residual), dtype=torch.int32)
    on_gpu.add_messages(counts, torch.stack([fixed, fixed, fixed]))
    assert torch.equal(counts, 3 * signs_of(message, len(residual)))


@pytest.mark.parametrize("density", [1e-4, 0.06, 0.3])
def test_messages_of_large_models_are_the_equations(density: float) -> None:
    """No element is missed, those beside multiples of a power of two neither."""
    num_elements = 5 * 2**16 + 5
    residual, gradients, tau = at_density(num_elements, density, 0, torch.float32)
    edges = torch.arange(6) * 2**16
    gradients[torch.cat([edges, edges[1:] - 1, torch.tensor([num_elements - 1])])] = -9 * tau
    expected = Step.of(residual, gradients, tau)
    message = on_cpu.take_message(residual, gradients, tau)
    assert message[HEADER_WORDS:].tolist() == expected.body()
    assert torch.equal(residual, expected.residual)
    assert torch.equal(signs_of(message, num_elements), expected.signs.int())


@pytest.mark.parametrize(
    ("num_sent", "encoding", "num_words"),
    [(0, 0, 0), (11, 0, 11), (12, 0, 12), (13, 1, 12), (170, 1, 12)],
)
def test_dense_messages_are_maps(num_sent: int, encoding: int, num_words: int) -> None:
    """Above 1/16 density the message is a 2-bit map, never longer; its signs are the same."""
    signs = torch.zeros(170)
    signs[torch.randperm(170, generator=torch.Generator().manual_seed(0))[:num_sent]] = 1
    signs[::2] *= -1
    message = on_cpu.take_message(torch.zeros(170), signs * 5, 4.0)
    assert (int(message[0]), len(message) - HEADER_WORDS) == (encoding, num_words)
    assert torch.equal(signs_of(message, 170).float(), signs)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("density", [1e-3, 0.5])
def test_a_gradient_that_is_not_finite_marks_every_later_message(
    broken: float, density: float
) -> None:
    """A NaN or an infinity remains in the residual, and marks this message and every later one."""
    residual, gradients, tau = at_density(9000, density, 1, torch.float32)
    gradients[8999] = broken
    on_cpu_residual = residual.clone()
    for _ in range(3):
        message = on_cpu.take_message(on_cpu_residual, gradients, tau)
        fixed = take_on_gpu(residual, gradients, tau, num_map_words(9000), first_block_zero())
        assert message[0] == fixed[0] == Encoding.NOT_FINITE
        assert not on_cpu_residual[8999].isfinite()
        assert not residual[8999].isfinite()
        gradients[8999] = 0.0
    counts = torch.zeros(9000, dtype=torch.int32)
    on_gpu.add_messages(counts, fixed[None])
    add_message(counts, message)
    assert not counts.any()


@pytest.mark.parametrize("num_below", range(65))
def test_neighbours_are_sent_however_many_stay_below(num_below: int) -> None:
    """Of 64 neighbouring elements all that reach the threshold are sent, however many do not."""
    residual, gradients = torch.zeros(2, 8192)
    gradients[64 + num_below : 128] = 1.0
    message = on_cpu.take_message(residual, gradients, 0.5)
    assert message[HEADER_WORDS:].tolist() == list(range(64 + num_below, 128))
