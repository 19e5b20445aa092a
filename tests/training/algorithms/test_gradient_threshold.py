"""Gradient threshold compression: the message and what stays behind."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from training.algorithms.gradient_threshold import (
    INDEX_BITS,
    PIECE_ELEMENTS,
    Encoding,
    add_message,
    check_gradient_threshold,
    is_finite,
    not_finite_message,
    take_message,
)

integer_gradients = st.integers(1, 80).flatmap(
    lambda n: st.lists(
        st.lists(st.integers(-40, 40), min_size=n, max_size=n), min_size=1, max_size=6
    )
)


def signs_of(message: Tensor, num_elements: int) -> Tensor:
    counts = torch.zeros(num_elements, dtype=torch.int32)
    add_message(counts, message)
    return counts


@given(integer_gradients, st.sampled_from([0.5, 1.0, 2.0, 8.0]))
def test_nothing_is_lost(steps: list[list[int]], tau: float) -> None:
    """Sum sent + residual = sum of gradients, exactly, for power-of-two thresholds."""
    residual = torch.zeros(len(steps[0]))
    sent = torch.zeros(len(steps[0]))
    for step in steps:
        residual += torch.tensor(step, dtype=torch.float32)
        sent += signs_of(take_message(residual, tau), len(residual)) * tau
    assert torch.equal(sent + residual, torch.tensor(steps, dtype=torch.float32).sum(0))


@given(integer_gradients, st.sampled_from([0.5, 3.0, 8.0]))
def test_one_threshold_a_step(steps: list[list[int]], tau: float) -> None:
    """Exactly the elements with |r| >= tau are sent, once, with their sign."""
    gradient = torch.tensor(steps[0], dtype=torch.float32)
    sent = signs_of(take_message(gradient.clone(), tau), len(gradient))
    assert sent.tolist() == [0 if abs(g) < tau else int(math.copysign(1, g)) for g in steps[0]]


@given(integer_gradients, st.randoms(use_true_random=False))
def test_order_of_ranks_cannot_matter(ranks: list[list[int]], random: object) -> None:
    """Any order of the same messages gives the same integers."""
    messages = [take_message(torch.tensor(r, dtype=torch.float32), 3.0) for r in ranks]
    counts = torch.zeros(len(ranks[0]), dtype=torch.int32)
    for message in messages:
        add_message(counts, message)
    random.shuffle(messages)  # type: ignore[attr-defined]
    shuffled = torch.zeros(len(ranks[0]), dtype=torch.int32)
    for message in messages:
        add_message(shuffled, message)
    assert torch.equal(counts, shuffled)


def test_words_are_sign_and_index() -> None:
    """A sent element is one 32-bit word: sign bit, 31-bit index."""
    residual = torch.zeros(100)
    residual[3], residual[97] = 9.0, -8.0
    words = take_message(residual, 8.0).tolist()
    assert words[0] == Encoding.INDICES
    assert [(word < 0, word & INDEX_BITS) for word in words[1:]] == [(False, 3), (True, 97)]


@pytest.mark.parametrize(
    ("num_sent", "encoding", "num_words"),
    [(0, 0, 0), (10, 0, 10), (11, 1, 11), (12, 1, 11), (170, 1, 11)],
)
def test_dense_messages_are_maps(num_sent: int, encoding: int, num_words: int) -> None:
    """Above 1/16 density the message is a 2-bit map, never longer; its signs are the same."""
    signs = torch.zeros(170)
    signs[torch.randperm(170, generator=torch.Generator().manual_seed(0))[:num_sent]] = 1
    signs[::2] *= -1
    message = take_message(signs * 5, 4.0)
    assert (int(message[0]), len(message) - 1) == (encoding, num_words)
    assert torch.equal(signs_of(message, 170).float(), signs)


def test_large_models_are_searched_whole() -> None:
    """Models are searched in pieces; elements at the pieces' edges are sent too."""
    residual = torch.zeros(2 * PIECE_ELEMENTS + 5)
    sent = [0, PIECE_ELEMENTS - 1, PIECE_ELEMENTS, 2 * PIECE_ELEMENTS, 2 * PIECE_ELEMENTS + 4]
    residual[sent] = 1.0
    assert take_message(residual, 1.0)[1:].tolist() == sent


def test_says_that_a_gradient_is_broken() -> None:
    """A message can say that its sender's gradient is not finite."""
    assert not is_finite(not_finite_message(torch.device("cpu")))
    assert is_finite(take_message(torch.ones(3), 1.0))


@pytest.mark.parametrize("tau", [-1.0, math.nan, math.inf])
def test_refuses_bad_thresholds(tau: float) -> None:
    """A threshold is finite and not negative."""
    with pytest.raises(ValueError, match=r"need a finite number >= 0"):
        check_gradient_threshold(tau, 10)


def test_refuses_models_beyond_31_bits() -> None:
    """Indices have 31 bits."""
    with pytest.raises(ValueError, match=r"2147483648 parameters: need at most 2147483647"):
        check_gradient_threshold(8.0, 2**31)
