"""Divide a flat vector of parameters into matrices and columns, and columns into stripes.

Paper 004 section 3 ties reconstruction values within a weight matrix's column (j, l), and defines
no j. The authors write a layer as W^T v + a, so column j is the weights into output unit j. That is
a row of torch's weight, so every column is contiguous in the vector.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import numpy as np
import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

_RECURRENT = re.compile(r"(?P<prefix>.*)(weight|bias)_(ih|hh)(?P<layer>(_l\d+)?(_reverse)?)")

MAX_BLOCK = 2**19
"""Elements of a block: operators' results then stay in a core's cache, 4 to 9 times as fast."""

MIN_SLICE = 2**12
"""Elements below which a run of columns is copied by index: launching operators costs more."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Matrix is a run of columns of one size, from the parameter `name`."""

    name: str
    num_columns: int
    column_size: int

    @property
    def num_elements(self) -> int:
        """Return the number of weights."""
        return self.num_columns * self.column_size


@dataclass(frozen=True, slots=True)
class Block:
    """Block is some columns of one size, on which torch's operators work together.

    `elements` and `columns` index a vector, and what has one value a column. They are slices where
    the columns are neighbours.
    """

    column_size: int
    elements: slice | Int64[Tensor, " block_elements"]
    columns: slice | Int64[Tensor, " block_columns"]

    def rows(self, vector: Shaped[Tensor, " elements"]) -> Shaped[Tensor, "block_columns size"]:
        """Return the block's part of a vector, a column a row; uncopied if it is a slice."""
        return vector[self.elements].view(-1, self.column_size)


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns divides a vector into matrices, in the vector's order and without a gap."""

    matrices: tuple[Matrix, ...]
    _blocks: dict[torch.device, tuple[Block, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def num_columns(self) -> int:
        """Return the number of columns of all matrices."""
        return sum(matrix.num_columns for matrix in self.matrices)

    @property
    def num_elements(self) -> int:
        """Return the vector's length."""
        return sum(matrix.num_elements for matrix in self.matrices)

    def blocks(self, device: torch.device) -> tuple[Block, ...]:
        """Divide the columns into few blocks, for vectors on a device; made once."""
        if device not in self._blocks:
            self._blocks[device] = tuple(_blocks_of(self.bounds(), device))
        return self._blocks[device]

    def bounds(self) -> Int64[np.ndarray, " columns_and_one"]:
        """Return the index at which each column begins, and the vector's length."""
        sizes = [np.full(matrix.num_columns, matrix.column_size) for matrix in self.matrices]
        return np.concatenate([np.zeros(1, np.int64), *sizes]).cumsum(dtype=np.int64)

    def between(self, first: int, end: int) -> "Columns":
        """Return the columns from `first` up to `end`, which may cut matrices between columns."""
        parts, begin = [], 0
        for matrix in self.matrices:
            low, high = max(first - begin, 0), min(end - begin, matrix.num_columns)
            if low < high:
                parts.append(Matrix(matrix.name, high - low, matrix.column_size))
            begin += matrix.num_columns
        return Columns(tuple(parts))


def columns_of(shapes: Mapping[str, Sequence[int]]) -> Columns:
    """Return the columns of parameters that lie one after the other, by name and shape.

    A column is the weights of one output unit, of a convolution those of one output channel. The
    stacked gates of an LSTM are four matrices, those of a GRU three. A bias, each gate's own, and
    any other tensor whose columns would have one element are one column.
    """
    return Columns(
        tuple(
            matrix
            for name, shape in shapes.items()
            if prod(shape) > 0
            for matrix in _matrices(name, shape, _num_gates(name, shapes))
        )
    )


def _matrices(name: str, shape: Sequence[int], num_stacked: int) -> list[Matrix]:
    num_elements, num_outputs = prod(shape), shape[0] if shape else 1
    if num_outputs == num_elements:
        return [Matrix(name, 1, num_elements // num_stacked)] * num_stacked
    stacked = Matrix(name, num_outputs // num_stacked, num_elements // num_outputs)
    return [stacked] * num_stacked


def _num_gates(name: str, shapes: Mapping[str, Sequence[int]]) -> int:
    """Return how many gates torch stacks in a recurrent layer's tensor, from its weight_hh.

    A tensor is one matrix if the layer's weight_hh is frozen, and has no place among the shapes.
    """
    match = _RECURRENT.fullmatch(name)
    if match is None:
        return 1
    recurrent = shapes.get(f"{match['prefix']}weight_hh{match['layer']}", ())
    # With a projection, weight_hh reads its outputs, and weight_hr the layer's units.
    units = shapes.get(f"{match['prefix']}weight_hr{match['layer']}", recurrent)
    if len(recurrent) != 2 or recurrent[0] % units[1] or shapes[name][0] != recurrent[0]:
        return 1
    return recurrent[0] // units[1]


def _blocks_of(
    bounds: Int64[np.ndarray, " columns_and_one"], device: torch.device
) -> Iterator[Block]:
    """Cut long runs of equal columns into slices; gather the short ones of a size by index."""
    sizes = np.diff(bounds)
    for size in np.unique(sizes).tolist():
        alike = np.flatnonzero(sizes == size)
        runs = np.split(alike, np.flatnonzero(np.diff(alike) > 1) + 1)
        long = [run for run in runs if len(run) * size >= MIN_SLICE]
        short = [run for run in runs if len(run) * size < MIN_SLICE]
        for run in [*long, np.concatenate([alike[:0], *short])]:
            for begin in range(0, len(run), max(1, MAX_BLOCK // size)):
                columns = run[begin : begin + max(1, MAX_BLOCK // size)]
                elements = (bounds[columns, None] + np.arange(size)).ravel()
                yield Block(size, _index(elements, device), _index(columns, device))


def _index(
    places: Int64[np.ndarray, " places"], device: torch.device
) -> slice | Int64[Tensor, " places"]:
    """Return a slice of ascending places if there is no gap among them, else all of them."""
    first, end = int(places[0]), int(places[-1]) + 1
    if end - first == len(places):
        return slice(first, end)
    return torch.from_numpy(places).to(device)


@dataclass(frozen=True, slots=True)
class Stripe:
    """Stripe is the part of the vector that one rank aggregates: whole columns (004 3.1)."""

    first_element: int
    columns: Columns

    def of(self, vector: Shaped[Tensor, " elements"]) -> Shaped[Tensor, " stripe"]:
        """Return the stripe of a vector, uncopied."""
        return vector.narrow(0, self.first_element, self.columns.num_elements)


def stripes_of(columns: Columns, num_ranks: int) -> tuple[Stripe, ...]:
    """Return each rank's stripe, in the vector's order: a 1/K-th, to the nearest column (004 3.1).

    A stripe's length differs from M / K by at most the longest column's; it may be 0.
    """
    if num_ranks < 1:
        raise ValueError(f"num_ranks = {num_ranks}: need at least 1")
    bounds, num_elements = columns.bounds(), columns.num_elements
    targets = np.array([rank * num_elements // num_ranks for rank in range(num_ranks + 1)])
    after = np.searchsorted(bounds, targets)
    before = np.maximum(after - 1, 0)
    is_nearer = targets - bounds[before] < bounds[after] - targets
    cuts = np.where(is_nearer, before, after).tolist()
    return tuple(
        Stripe(int(bounds[first]), columns.between(first, end)) for first, end in pairwise(cuts)
    )
