"""Columns and stripes: what a column is, and which rank aggregates it."""

from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from training.algorithms import one_bit as module
from training.algorithms.one_bit import Columns, Matrix, columns_of, stripes_of

CPU = torch.device("cpu")


def columns_of_module(module: nn.Module) -> Columns:
    return columns_of({name: tuple(p.shape) for name, p in module.named_parameters()})


def test_a_column_is_the_weights_into_one_output_unit() -> None:
    """A row of weights is what the unit's output depends on; the bias is one column."""
    linear = nn.Linear(5, 3)
    columns = columns_of_module(linear)
    assert columns.matrices == (Matrix("weight", 3, 5), Matrix("bias", 1, 3))
    vector = nn.utils.parameters_to_vector(linear.parameters()).detach()
    rows = {block.column_size: block.rows(vector) for block in columns.blocks(vector.device)}
    inputs = torch.randn(5)
    torch.testing.assert_close(rows[5] @ inputs + rows[3][0], linear(inputs))


@pytest.mark.parametrize(("kind", "num_gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_stacked_gates_are_matrices_of_their_own(kind: type[nn.RNNBase], num_gates: int) -> None:
    """An LSTM's tensors are four matrices each, one a gate, in both directions; a GRU's three."""
    columns = columns_of_module(kind(6, 7, 2, bidirectional=True))
    expected = [
        Matrix(f"{name}_l{layer}{way}", *shape)
        for layer, num_inputs in enumerate((6, 14))
        for way in ("", "_reverse")
        for name, shape in (
            ("weight_ih", (7, num_inputs)),
            ("weight_hh", (7, 7)),
            ("bias_ih", (1, 7)),
            ("bias_hh", (1, 7)),
        )
        for _ in range(num_gates)
    ]
    assert list(columns.matrices) == expected


def test_gates_are_found_with_a_projection_below_other_names_and_in_cells() -> None:
    """weight_hh is then not square in its gates, or has no layer, or the module has a name."""
    projected = columns_of_module(nn.ModuleDict({"x": nn.LSTM(6, 8, proj_size=3)})).matrices
    assert projected.count(Matrix("x.bias_ih_l0", 1, 8)) == 4
    assert projected.count(Matrix("x.weight_hh_l0", 8, 3)) == 4
    assert projected[-1] == Matrix("x.weight_hr_l0", 3, 8)
    assert columns_of_module(nn.LSTMCell(6, 8)).matrices.count(Matrix("bias_hh", 1, 8)) == 4


def test_other_tensors_have_a_column_an_output_channel() -> None:
    """Filters are columns; tensors of one column, one element or none have no more than one."""
    shapes = {"filters": (8, 4, 3), "vector": (5,), "scalar": (), "thin": (6, 1), "empty": (0, 3)}
    assert columns_of(shapes).matrices == (
        Matrix("filters", 8, 12),
        Matrix("vector", 1, 5),
        Matrix("scalar", 1, 1),
        Matrix("thin", 1, 6),
    )


def test_biases_alone_are_one_column() -> None:
    """A bias whose layer has frozen weights, or that only has an LSTM's name, is not cut."""
    assert columns_of({"bias_hh_l0": (8,)}).matrices == (Matrix("bias_hh_l0", 1, 8),)
    odd = columns_of({"weight_hh": (5, 2), "bias_hh": (5,)})
    assert odd.matrices == (Matrix("weight_hh", 5, 2), Matrix("bias_hh", 1, 5))


MATRICES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=6)


@given(MATRICES, st.integers(1, 12))
def test_stripes_are_whole_columns_and_balanced(
    sizes: list[tuple[int, int]], num_ranks: int
) -> None:
    """Stripes cover the vector in order; each has M / K elements but for the longest column's."""
    columns = Columns(tuple(Matrix(str(n), *size) for n, size in enumerate(sizes)))
    column_numbers = torch.arange(columns.num_columns)
    lengths = [size for num, size in sizes for _ in range(num)]
    of_elements = column_numbers.repeat_interleave(torch.tensor(lengths))
    stripes = stripes_of(columns, num_ranks)
    parts = [stripe.of(of_elements) for stripe in stripes]
    assert torch.equal(torch.cat(parts), of_elements)
    filled = [part for part in parts if len(part)]
    assert all(left[-1] < right[0] for left, right in pairwise(filled))
    for stripe, part in zip(stripes, parts, strict=True):
        assert abs(len(part) - len(of_elements) / num_ranks) <= max(lengths) + 1
        assert stripe.columns.num_columns == len(part.unique())
        # A stripe's own columns are the vector's, uncut.
        assert np.diff(stripe.columns.bounds()).tolist() == [lengths[n] for n in part.unique()]


@given(MATRICES, st.integers(1, 200), st.integers(0, 100))
def test_blocks_hold_every_column_once(
    sizes: list[tuple[int, int]], max_block: int, min_slice: int
) -> None:
    """Whatever is a slice, gathered or cut: all rows of a block are whole columns of one size."""
    columns = Columns(tuple(Matrix(str(n), *size) for n, size in enumerate(sizes)))
    column_numbers = torch.arange(columns.num_columns)
    of_elements = column_numbers.repeat_interleave(torch.from_numpy(np.diff(columns.bounds())))
    with patch.multiple(module, MAX_BLOCK=max_block, MIN_SLICE=min_slice):
        blocks = columns.blocks(CPU)
    for block in blocks:
        numbers = column_numbers[block.columns]
        assert torch.equal(block.rows(of_elements), numbers[:, None].expand(-1, block.column_size))
        assert len(numbers) == 1 or block.rows(of_elements).numel() <= max_block
    held = torch.cat([of_elements[block.elements] for block in blocks])
    assert torch.equal(held.sort().values, of_elements)


def test_blocks_are_as_few_as_sizes() -> None:
    """Of 300 small tensors of three shapes in turn, and of 25 M weights of an LSTM's.

    Torch's operators take 20 us a block and step, whatever the model: 300 would take 6 ms.
    """
    small = columns_of({f"{n}": ((8, 8), (64,), (4, 16))[n % 3] for n in range(300)})
    assert len(small.blocks(CPU)) == 3
    with torch.device("meta"):
        lstm = columns_of_module(nn.LSTM(192, 768, 5))
    assert len(lstm.blocks(CPU)) < 50


def test_long_runs_are_not_copied() -> None:
    """Neighbours of one size are slices of the vector, also where others lie between two runs."""
    columns = columns_of({"a": (64, 128), "b": (64,), "c": (64, 128), "d": (64, 128)})
    vector = torch.zeros(columns.num_elements)
    for block in columns.blocks(CPU):
        block.rows(vector).fill_(1.0)
    assert bool(vector.all())


def test_no_rank_has_no_stripes() -> None:
    """The message names the number and the bound."""
    with pytest.raises(ValueError, match=r"^num_ranks = 0: need at least 1"):
        stripes_of(columns_of({"weight": (2, 3)}), 0)
