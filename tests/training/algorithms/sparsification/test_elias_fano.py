"""Ascending indices come back from few bits, whose number is known in advance."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.algorithms.top_k import high_parts, unary_bits
from training.algorithms.top_k_lengths import num_low_bits, num_unary_bits


@st.composite
def rows(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Draw a bound, and some rows of equally many ascending indices below it."""
    num_values = draw(st.integers(1, 300))
    num_indices = draw(st.integers(1, num_values))
    row = st.sets(st.integers(0, num_values - 1), min_size=num_indices, max_size=num_indices)
    return num_values, [sorted(each) for each in draw(st.lists(row, min_size=1, max_size=3))]


@given(rows())
def test_indices_come_back(case: tuple[int, list[list[int]]]) -> None:
    """Unary bits and low bits give every index, from 1 of n to all n."""
    num_values, indices = case[0], torch.tensor(case[1])
    num_indices = indices.shape[1]
    bits = unary_bits(indices, num_values)
    assert bits.shape == (len(indices), num_unary_bits(num_values, num_indices))
    low = num_low_bits(num_values, num_indices)
    rebuilt = high_parts(bits, num_indices) << low | indices & (1 << low) - 1
    assert torch.equal(rebuilt, indices)


def test_each_index_is_a_one_at_its_place() -> None:
    """Of 16 values, 4 indices have 2 low bits: high parts 0, 0, 2, 3 are ones at 0, 1, 4, 6."""
    bits = unary_bits(torch.tensor([[1, 3, 8, 15]]), 16)
    assert bits.int().tolist() == [[1, 1, 0, 0, 1, 0, 1]]


@pytest.mark.parametrize(("num_indices", "num_bits"), [(41, 350), (123, 865), (410, 2151)])
def test_few_more_bits_than_any_code_needs(num_indices: int, num_bits: int) -> None:
    """At 1, 3 and 10 % of 4096: at most 0.6 bits an index above log2 of the number of choices."""
    low = num_low_bits(4096, num_indices)
    assert low * num_indices + num_unary_bits(4096, num_indices) == num_bits
    least = math.log2(math.comb(4096, num_indices))
    assert least < num_bits < least + 0.6 * num_indices
