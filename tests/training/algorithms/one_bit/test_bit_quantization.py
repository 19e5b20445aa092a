"""1-bit messages: least square error, nothing lost, and one bit an element."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from training.algorithms.one_bit import (
    Columns,
    Matrix,
    add_message,
    num_message_words,
    take_message,
)

COLUMNS = Columns((Matrix("a", 3, 5), Matrix("b", 1, 7), Matrix("c", 40, 33)))


def random_vector(seed: int, columns: Columns = COLUMNS) -> Tensor:
    return torch.randn(columns.num_elements, generator=torch.Generator().manual_seed(seed))


def decoded(message: Tensor, columns: Columns) -> Tensor:
    total = torch.zeros(columns.num_elements)
    add_message(total, message, columns)
    return total


def quantized(vector: Tensor, columns: Columns) -> Tensor:
    """Return Q^-1(Q(vector))."""
    return decoded(take_message(torch.zeros_like(vector), vector, columns), columns)


def reference(vector: np.ndarray, columns: Columns) -> np.ndarray:
    """Quantize a column at a time."""
    result, begin = np.empty_like(vector), 0
    for matrix in columns.matrices:
        for _ in range(matrix.num_columns):
            column = vector[begin : begin + matrix.column_size]
            for side in (column >= 0, column < 0):
                if side.any():
                    result[begin : begin + matrix.column_size][side] = column[side].mean()
            begin += matrix.column_size
    return result


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(-4, 4, width=32), min_size=1, max_size=6))
def test_values_minimize_a_columns_square_error(elements: list[float]) -> None:
    """With threshold 0, no pair of values on a grid of steps of 1/8 has a lower square error."""
    column = torch.tensor(elements)
    columns = Columns((Matrix("a", 1, len(elements)),))
    error = float((column - quantized(column, columns)).double().square().sum())
    values = np.arange(-4, 4.01, 0.125)
    upper, lower = column[column >= 0].numpy(), column[column < 0].numpy()
    best = sum(
        np.square(side[None] - values[:, None], dtype=np.float64).sum(1).min()
        for side in (upper, lower)
    )
    assert error <= best + 1e-6


def test_values_beat_every_other_pair_and_every_column_has_its_own() -> None:
    """A pair moved by 1 % in any direction raises the column's error; columns differ."""
    columns = Columns((Matrix("a", 40, 33),))
    vector = random_vector(0, columns)
    v, q = (each.view(40, 33) for each in (vector, quantized(vector, columns)))
    least = (v - q).double().square().sum(1)
    for factors in itertools.product((0.99, 1.0, 1.01), repeat=2):
        moved = q * torch.where(v >= 0, *factors)
        if factors != (1.0, 1.0):
            assert ((v - moved).double().square().sum(1) > least).all()
    assert all(len(row.unique()) == 2 for row in q)
    assert len(q.unique()) == 2 * len(q)


@pytest.mark.parametrize("seed", range(3))
def test_messages_decode_to_the_reference(seed: int) -> None:
    """A message adds the mean of each side, as NumPy computes it a column at a time."""
    vector = random_vector(seed)
    expected = reference(vector.numpy().astype(np.float64), COLUMNS)
    np.testing.assert_allclose(quantized(vector, COLUMNS), expected, rtol=2e-6)
    total = torch.full_like(vector, 2.0)
    add_message(total, take_message(torch.zeros_like(vector), vector, COLUMNS), COLUMNS)
    torch.testing.assert_close(total, 2 + quantized(vector, COLUMNS), rtol=0, atol=0)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 200), st.integers(0, 2**32))
def test_bits_are_the_signs_whatever_the_length(size: int, seed: int) -> None:
    """Elements from 0 up have set bits, lowest first; the last word is padded with zeros."""
    columns = Columns((Matrix("a", 1, size),))
    vector = random_vector(seed, columns)
    message = take_message(torch.zeros(size), vector, columns)
    bits = np.unpackbits(message[2:].numpy().view(np.uint8), bitorder="little")
    assert np.array_equal(bits[:size], (vector >= 0).numpy())
    assert not bits[size:].any()
    assert torch.equal(decoded(message, columns) >= 0, vector >= 0)


def test_a_message_has_one_bit_an_element_and_eight_bytes_a_column() -> None:
    """Bits are 1/32 of float32's bytes, in whole words."""
    columns = Columns((Matrix("a", 64, 1024),))
    message = take_message(torch.zeros(65536), torch.ones(65536), columns)
    assert message.nbytes == 65536 * 4 // 32 + 64 * 8
    assert num_message_words(COLUMNS) == 2 * 44 + 42
    assert len(take_message(torch.zeros(1342), random_vector(0), COLUMNS)) == 130
    assert num_message_words(Columns(())) == 0


def test_equal_signs_zeros_and_no_elements() -> None:
    """A side without elements has the value 0; zeros of both signs are above; none is a message."""
    for column in ([1.0, 3.0], [-1.0, -3.0], [0.0, -0.0], [5.0]):
        columns = Columns((Matrix("a", 1, len(column)),))
        vector = torch.tensor(column)
        assert torch.equal(quantized(vector, columns), vector.mean().expand(len(column)))
    assert torch.equal(quantized(torch.zeros(0), Columns(())), torch.zeros(0))


def test_error_feedback_loses_nothing() -> None:
    """In each step and in 200, what was sent and the residual are the sum of the gradients."""
    residual, sent, total = (torch.zeros(COLUMNS.num_elements) for _ in range(3))
    sent64, total64 = sent.double(), total.double()
    for step in range(200):
        gradients = random_vector(step)
        message = take_message(residual, gradients, COLUMNS)
        sent64 += decoded(message, COLUMNS)
        total64 += gradients
        torch.testing.assert_close(sent64 + residual, total64, rtol=0, atol=2e-4)
    # The residual remains of the order of a step, so the mean of what is sent is the gradients'.
    assert residual.abs().max() < 20
    assert (sent64 - total64).abs().mean() < 0.02 * 200


def test_integers_are_conserved_exactly() -> None:
    """Sent and residual equal the gradients bit for bit, if means are exact in float32."""
    columns = Columns((Matrix("a", 1, 4),))
    residual, sent = torch.zeros(4), torch.zeros(4)
    gradients = torch.tensor([8.0, 2.0, -1.0, -4.0])
    for step in range(1, 9):
        sent += decoded(take_message(residual, gradients, columns), columns)
        assert torch.equal(sent + residual, step * gradients)


def test_the_printed_residual_loses_gradients() -> None:
    """Section 3 to the letter, Delta = G - Q^-1, loses 0.5 of an element in every step.

    With the error carried in, the residual of the same gradients stays below 30.
    """
    columns, gradient = Columns((Matrix("a", 1, 3),)), np.array([1.0, 2.0, -8.0])
    lost, sent, delta, residual = [], np.zeros(3), np.zeros(3), torch.zeros(3)
    for step in range(1, 201):
        q = reference(gradient + delta, columns)
        sent, delta = sent + q, gradient - q
        lost.append(np.abs(step * gradient - sent - delta).max())
        take_message(residual, torch.from_numpy(gradient).float(), columns)
        assert residual.abs().max() < 30
    assert (lost[99], lost[199]) == (49.5, 99.5)


def test_residuals_of_float64_take_up_what_float32_rounds() -> None:
    """Reconstruction values are float32, and their rounding error stays in the residual."""
    vector = random_vector(0).double() / 3
    residual = torch.zeros_like(vector)
    sent = torch.zeros_like(vector)
    add_message(sent, take_message(residual, vector, COLUMNS), COLUMNS)
    torch.testing.assert_close(sent + residual, vector, rtol=0, atol=1e-15)
    assert torch.equal(sent, sent.float().double())


def is_unquantized_finite(message: Tensor, columns: Columns) -> bool:
    """Return whether all that a receiver makes of a message is finite."""
    total = torch.zeros(columns.num_elements)
    add_message(total, message, columns)
    return bool(total.isfinite().all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 17, 1341])
def test_a_gradient_that_is_not_finite_shows_in_its_message(bad: float, place: int) -> None:
    """One such element suffices, and the residual keeps it, so later messages show it too."""
    gradients, residual = random_vector(0), torch.zeros(COLUMNS.num_elements)
    assert is_unquantized_finite(take_message(residual.clone(), gradients, COLUMNS), COLUMNS)
    gradients[place] = bad
    assert not is_unquantized_finite(take_message(residual, gradients, COLUMNS), COLUMNS)
    assert not is_unquantized_finite(take_message(residual, random_vector(1), COLUMNS), COLUMNS)


def test_a_message_of_another_model_is_refused() -> None:
    """The error names both lengths and the remedy."""
    problem = r"^a message of 129 words: need 130 for 1342 parameters in 44 columns; start all"
    message = take_message(torch.zeros(1342), random_vector(0), COLUMNS)[1:]
    with pytest.raises(ValueError, match=problem):
        add_message(torch.zeros(1342), message, COLUMNS)
