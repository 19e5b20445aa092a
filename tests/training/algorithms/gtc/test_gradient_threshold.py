"""Check the properties of gradient threshold compression: messages and residuals."""

import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training.algorithms.gtc.encoding import (
    add_message,
    check_gradient_threshold,
    is_finite,
    num_map_words,
    num_plane_words,
    take_message,
)

integer_gradients = st.integers(1, 80).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(-40, 40), min_size=n, max_size=n), min_size=1, max_size=6
    )
)


def message_of(gradients: list[int], tau: float) -> Tensor:
    return take_message(torch.zeros(len(gradients)), torch.tensor(gradients).float(), tau)


def counts_of(messages: list[Tensor], num_elements: int) -> Tensor:
    counts = torch.zeros(num_elements, dtype=torch.int32)
    for message in messages:
        add_message(counts, message)
    return counts


@given(integer_gradients, st.sampled_from([0.5, 1.0, 2.0, 8.0]))
@settings(deadline=None)
def test_no_gradient_is_lost(steps: list[list[int]], tau: float) -> None:
    """Sum sent + residual = sum of gradients, exactly, for power-of-two thresholds."""
    residual = torch.zeros(len(steps[0]))
    gradients = torch.tensor(steps).float()
    messages = [take_message(residual, step, tau) for step in gradients]
    assert torch.equal(counts_of(messages, len(residual)) * tau + residual, gradients.sum(0))


@given(integer_gradients, st.sampled_from([0.5, 3.0, 8.0]))
@settings(deadline=None)
def test_an_element_is_sent_once_a_step(steps: list[list[int]], tau: float) -> None:
    """Exactly the elements with |r| >= tau are sent, once, with their sign."""
    sent = counts_of([message_of(steps[0], tau)], len(steps[0]))
    assert sent.tolist() == [0 if abs(g) < tau else int(math.copysign(1, g)) for g in steps[0]]


@given(integer_gradients, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_order_of_ranks_does_not_matter(ranks: list[list[int]], random: object) -> None:
    """Any order of the same messages gives the same integers."""
    messages = [message_of(rank, 3.0) for rank in ranks]
    counts = counts_of(messages, len(ranks[0]))
    random.shuffle(messages)  # type: ignore[attr-defined]
    assert torch.equal(counts, counts_of(messages, len(ranks[0])))


@pytest.mark.parametrize("tau", [-1.0, math.nan, math.inf])
def test_refuses_bad_thresholds(tau: float) -> None:
    """A threshold that is negative or not finite is refused."""
    with pytest.raises(ValueError, match=f"^gradient_threshold = {tau}: need a finite number >= 0"):
        check_gradient_threshold(tau, torch.zeros(10))


@pytest.mark.parametrize("tau", [1e-60, 1e60])
def test_refuses_thresholds_that_the_parameters_type_does_not_have(tau: float) -> None:
    """In float32 they are 0, which every element reaches, or infinite, which none reaches."""
    with pytest.raises(ValueError, match=rf"= {re.escape(str(tau))}: not within torch.float32"):
        check_gradient_threshold(tau, torch.zeros(10))
    check_gradient_threshold(tau, torch.zeros(10, dtype=torch.float64))


def test_refuses_half_precision() -> None:
    """A residual in bfloat16 loses what is below 1/256 of it; unquantized sums have no residual."""
    with pytest.raises(ValueError, match=r"torch.bfloat16: need float32 or float64"):
        check_gradient_threshold(1.0, torch.zeros(10, dtype=torch.bfloat16))
    check_gradient_threshold(0.0, torch.zeros(10, dtype=torch.bfloat16))


def test_refuses_models_beyond_31_bits() -> None:
    """A model with more elements than 31-bit indices is refused."""
    with pytest.raises(ValueError, match=r"2147483648 parameters: need at most 2147483647"):
        check_gradient_threshold(8.0, torch.zeros(1).expand(2**31))
    check_gradient_threshold(8.0, torch.zeros(1).expand(2**31 - 1))


def test_a_map_is_sixteen_elements_a_word() -> None:
    """A map has two planes of one bit for each element, each of whole 32-bit words."""
    assert [num_plane_words(n) for n in (0, 1, 32, 33, 64, 65)] == [0, 1, 1, 2, 2, 3]
    assert [num_map_words(n) for n in (0, 1, 32, 33)] == [0, 2, 2, 4]


def test_a_message_is_read_as_it_is_written() -> None:
    """Indices and maps are added as they were written; a gradient that is not finite adds 0."""
    indices = torch.tensor([0, 2, 5, 3 - 2**31], dtype=torch.int32)
    of_map = torch.tensor([1, 2, 0b101000, 0b001000], dtype=torch.int32)
    broken = torch.tensor([2, 2], dtype=torch.int32)
    assert [is_finite(each) for each in (indices, of_map, broken)] == [True, True, False]
    assert counts_of([indices], 7).tolist() == [0, 0, 0, -1, 0, 1, 0]
    assert counts_of([of_map], 7).tolist() == [0, 0, 0, -1, 0, 1, 0]
    assert counts_of([indices, of_map, broken], 7).tolist() == [0, 0, 0, -2, 0, 2, 0]
