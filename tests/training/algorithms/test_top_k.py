"""Top-k messages: the largest elements of each chunk, nothing lost, and lengths known before."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training.algorithms.top_k import add_message, take_message
from training.algorithms.top_k_lengths import CHUNK_ELEMENTS, num_message_words
from training.settings.trainers import TopK


def bfloat16(value: np.floating) -> np.float32:
    return np.float32(float(torch.tensor(float(value)).bfloat16()))


def sent_of(vector: np.ndarray, top_k: TopK) -> np.ndarray:
    """Send a chunk at a time, an element at a time: Q(TopK(vector))."""
    sent = np.zeros_like(vector)
    for begin in range(0, len(vector), CHUNK_ELEMENTS):
        chunk = vector[begin : begin + CHUNK_ELEMENTS]
        order = np.argsort(-np.abs(chunk), kind="stable")
        kept = order[: math.ceil(top_k.density * len(chunk))]
        magnitudes = np.abs(chunk[kept])
        least, most = magnitudes.min(), magnitudes.max()
        width = (most - least) / np.float32(2 ** (top_k.bits - 1))
        low, high = bfloat16(least + width / 2), bfloat16(most - width / 2)
        step = (high - low) / np.float32(2 ** (top_k.bits - 1) - 1)
        for index, magnitude in zip(kept, magnitudes, strict=True):
            cell = int((magnitude - least) // width) if width > 0 else 0
            level = low + np.float32(min(cell, 2 ** (top_k.bits - 1) - 1)) * step
            sent[begin + index] = np.copysign(level, chunk[index])
    return sent


SIZES = (1, 18, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, 2 * CHUNK_ELEMENTS + 77)
TOP_K = TopK(density=0.02, bits=2, error_decay=1.0)


def random_vector(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def decoded(message: Tensor, size: int, top_k: TopK) -> Tensor:
    total = torch.zeros(size)
    add_message(total, message, top_k)
    return total


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("size", SIZES)
def test_messages_are_the_equations(size: int, bits: int) -> None:
    """What receivers add is Q(TopK(e)) of an independent reference, and the residual the rest."""
    top_k = replace(TOP_K, bits=bits)
    vector, residual = random_vector(size), torch.zeros(size)
    sent = decoded(take_message(residual, vector, top_k), size, top_k)
    expected = sent_of(vector.numpy(), top_k)
    np.testing.assert_allclose(sent.numpy(), expected, rtol=1e-6)
    assert torch.equal(sent != 0, torch.from_numpy(expected) != 0)
    assert torch.equal(residual, vector - sent)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.integers(-(2**9), 2**9), min_size=1, max_size=40), st.sampled_from((0.05, 0.3, 1.0))
)
def test_message_and_residual_add_up_exactly(numbers: list[int], density: float) -> None:
    """Integers up to 512 and levels of 8 bits are exact: what is sent and kept is what there was.

    Equal elements are common here: of these the first are sent.
    """
    top_k = replace(TOP_K, density=density)
    vector, residual = torch.tensor(numbers, dtype=torch.float32), torch.zeros(len(numbers))
    sent = decoded(take_message(residual, vector, top_k), len(numbers), top_k)
    assert torch.equal(sent + residual, vector)
    assert np.array_equal(sent.numpy(), sent_of(vector.numpy(), top_k))


def test_each_chunk_sends_its_own_largest() -> None:
    """A chunk of small elements sends as many as one of large ones; the last, short one fewer."""
    size = 2 * CHUNK_ELEMENTS + 77
    vector = random_vector(size)
    vector[:CHUNK_ELEMENTS] /= 1000
    residual = torch.zeros(size)
    sent = decoded(take_message(residual, vector, TOP_K), size, TOP_K) != 0
    counts = [int(chunk.sum()) for chunk in sent.split(CHUNK_ELEMENTS)]
    assert counts == [82, 82, 2]  # 2 % of 4096 are 81.92, of 77 they are 1.54
    for chunk, is_sent in zip(
        vector.split(CHUNK_ELEMENTS), sent.split(CHUNK_ELEMENTS), strict=True
    ):
        assert chunk[is_sent].abs().min() >= chunk[~is_sent].abs().max()


def test_the_residual_decays_before_the_change_is_added() -> None:
    """e <- beta e + delta, and only then is e sent from; with beta 0 nothing is remembered."""
    old, change = random_vector(500, 1), random_vector(500, 2)
    for decay in (0.0, 0.5, 1.0):
        top_k = replace(TOP_K, error_decay=decay)
        residual, expected = old.clone(), decay * old + change
        sent = decoded(take_message(residual, change, top_k), 500, top_k)
        assert torch.equal(residual, expected - sent)


@pytest.mark.parametrize(
    ("size", "density", "bits", "num_words"),
    [
        (CHUNK_ELEMENTS, 0.03, 2, 1 + 27 + 8),  # 123 codes of 5 + 2 bits; 123 + 127 unary bits
        (CHUNK_ELEMENTS, 0.03, 8, 1 + 50 + 8),  # and of 5 + 8
        (CHUNK_ELEMENTS + 1, 0.03, 2, 1 + 27 + 8 + 3),
        (10 * CHUNK_ELEMENTS, 0.03, 2, 10 + 270 + 79),  # chunks share words
        (CHUNK_ELEMENTS, 1.0, 2, 1 + 256 + 256),  # all elements: 2 bits, and 2 for each index
        (0, 0.03, 2, 0),
    ],
)
def test_lengths_are_known_in_advance(size: int, density: float, bits: int, num_words: int) -> None:
    """A word a chunk, the bits of all codes and unary bits; whatever the elements are."""
    top_k = TopK(density=density, bits=bits)
    assert num_message_words(size, top_k) == num_words
    for vector in (torch.zeros(size), random_vector(size)):
        assert len(take_message(torch.zeros(size), vector, top_k)) == num_words


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 5000])
def test_what_is_not_finite_is_sent(fault: float, place: int) -> None:
    """A NaN or an infinity reaches every receiver, wherever it lies, and stays in the residual."""
    size = CHUNK_ELEMENTS + 1000
    vector, residual = random_vector(size), torch.zeros(size)
    vector[place] = fault
    sent = decoded(take_message(residual, vector, TOP_K), size, TOP_K)
    assert not sent[place].isfinite()
    assert not residual[place].isfinite()


def test_zeros_are_sent_as_zeros() -> None:
    """A chunk without change divides nothing by 0."""
    residual = torch.zeros(100)
    message = take_message(residual, torch.zeros(100), TOP_K)
    assert torch.equal(decoded(message, 100, TOP_K), torch.zeros(100))
    assert torch.equal(residual, torch.zeros(100))
