"""Sum the ranks' gradients in two stages of one bit an element (paper 004 sections 3, 5).

Reconstruction values belong to a column (j, l) of a weight matrix, and the paper defines no j. The
authors write a layer as W^T v + a, so column j is the weights into output unit j. That is a row of
torch's weight, so every column is contiguous in the vector of parameters.

A message is a vector of 32-bit words. First come two float32 reconstruction values for each column:
all columns' means of the elements from 0 up, then all columns' means of those below. One bit for
each element follows, lowest bit first, set from 0 up. The error is kept for the next time.

Each rank aggregates a stripe of the parameters, whole columns. One training step of a rank is

    take_messages   one message for each rank, about that rank's stripe: send the k-th to rank k
    take_aggregate  from the messages received, one from each rank: send the new one to all ranks
    update          from all ranks' second messages, the update that every rank applies

A trainer only moves the messages' bytes, whose lengths `num_message_words` tells in advance. A
training that begins without quantization (5.2) has `take_parts` and `take_sum` in their place.
AdaGrad normalizes at one of four places (5.3).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64, Int32, Int64, Shaped
from torch import Tensor

from training.settings.trainers import AdaGrad, AdaGradPlace

_RECURRENT = re.compile(r"(?P<prefix>.*)(weight|bias)_(ih|hh)(?P<layer>(_l\d+)?(_reverse)?)")

MAX_BLOCK = 2**19
"""Elements of a block: operators' results then stay in a core's cache, 4 to 9 times as fast."""

MIN_SLICE = 2**12
"""Elements below which a run of columns is copied by index: launching operators costs more."""


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


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Columns divides a vector without a gap; column n begins at `bounds[n]`, and ends the next."""

    bounds: Int64[np.ndarray, " columns_and_one"]
    _blocks: dict[torch.device, tuple[Block, ...]] = field(
        default_factory=dict, init=False, repr=False
    )

    @property
    def num_columns(self) -> int:
        """Return the number of columns."""
        return len(self.bounds) - 1

    @property
    def num_elements(self) -> int:
        """Return the vector's length."""
        return int(self.bounds[-1])

    def blocks(self, device: torch.device) -> tuple[Block, ...]:
        """Divide the columns into few blocks, for vectors on a device; made once."""
        if device not in self._blocks:
            self._blocks[device] = tuple(_blocks_of(self.bounds, device))
        return self._blocks[device]

    def between(self, first: int, end: int) -> "Columns":
        """Return the columns from `first` up to `end`."""
        return Columns(self.bounds[first : end + 1] - self.bounds[first])


def columns_of(shapes: Mapping[str, Sequence[int]]) -> Columns:
    """Return the columns of parameters that lie one after the other, by name and shape.

    A column is the weights of one output unit, of a convolution those of one output channel. The
    stacked gates of an LSTM are four matrices, those of a GRU three. A bias, each gate's own, and
    any other tensor whose columns would have one element are one column.
    """
    sizes = [np.zeros(1, np.int64)]
    for name, shape in shapes.items():
        if (num_elements := prod(shape)) > 0:
            outputs = shape[0] if shape else 1
            # Each gate has its own bias; each row of a matrix is a column, whatever its gate.
            number = _num_gates(name, shapes) if outputs == num_elements else outputs
            sizes.append(np.full(number, num_elements // number))
    return Columns(np.concatenate(sizes).cumsum())


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
    bounds, num_elements = columns.bounds, columns.num_elements
    targets = np.array([rank * num_elements // num_ranks for rank in range(num_ranks + 1)])
    after = np.searchsorted(bounds, targets)
    before = np.maximum(after - 1, 0)
    is_nearer = targets - bounds[before] < bounds[after] - targets
    cuts = np.where(is_nearer, before, after).tolist()
    return tuple(
        Stripe(int(bounds[first]), columns.between(first, end)) for first, end in pairwise(cuts)
    )


WORD_BITS = 32
_OCTET_BITS = 8
# An octet in each of a word's 8 bytes; of the k-th byte, counted from the lowest, only bit k.
_EACH_BYTE = 0x0101_0101_0101_0101
_ISOLATE_BITS = sum(1 << 9 * bit for bit in range(_OCTET_BITS)) - (1 << 64)
# Multiplied by a 0 or 1 in each of 8 bytes, this collects them in the highest byte, without carry.
_COLLECT_OCTET = sum(1 << 56 - 7 * bit for bit in range(_OCTET_BITS))


def num_bit_words(num_elements: int) -> int:
    """Return the number of words of one bit for each element, 1/32 of the words of float32."""
    return -(-num_elements // WORD_BITS)


def num_message_words(columns: Columns) -> int:
    """Return the number of words of every message of these columns, 4 bytes each."""
    return 2 * columns.num_columns + num_bit_words(columns.num_elements)


def take_message(
    residual: Float[Tensor, " elements"], gradients: Float[Tensor, " elements"], columns: Columns
) -> Int32[Tensor, " words"]:
    """Add a step's gradients r += g; move Q^-1(Q(r)) from the residual into a message.

    Section 3 as printed keeps Delta = G - Q^-1, which drops the error carried in. Only what is kept
    here, Delta = (G + Delta_before) - Q^-1, adds every gradient up into the model. A gradient that
    is not finite makes neither message nor residual finite: resume from a checkpoint.
    """
    residual.add_(gradients)
    num_words, device = num_bit_words(len(residual)), residual.device
    bits = torch.zeros(WORD_BITS * num_words, dtype=torch.bool, device=device)
    values = torch.empty(2, columns.num_columns, dtype=torch.float32, device=device)
    for block in columns.blocks(device):
        r = block.rows(residual)
        # The threshold is 0. A mean minimizes the square error of its side; no element has mean 0.
        upper = r >= 0
        num_upper = upper.sum(1, dtype=torch.int32)
        above = r.clamp(min=0).sum(1) / num_upper.clamp(min=1)
        below = r.clamp(max=0).sum(1) / (block.column_size - num_upper).clamp(min=1)
        means = torch.stack([above, below]).float()
        bits[block.elements] = upper.flatten()
        values[:, block.columns] = means
        residual[block.elements] -= _unquantized(upper, means).flatten()
    return torch.cat([values.view(torch.int32).flatten(), _packed(bits)])


def add_message(
    total: Float[Tensor, " elements"], message: Int32[Tensor, " words"], columns: Columns
) -> None:
    """Add a message's unquantized values Q^-1 to `total`."""
    assert len(message) == num_message_words(columns)
    values = message[: 2 * columns.num_columns].view(torch.float32).view(2, -1)
    upper = _unpacked(message[2 * columns.num_columns :])
    for block in columns.blocks(total.device):
        unquantized = _unquantized(block.rows(upper), values[:, block.columns])
        total[block.elements] += unquantized.flatten()


def _unquantized(
    upper: Bool[Tensor, "columns size"], means: Float32[Tensor, "2 columns"]
) -> Float32[Tensor, "columns size"]:
    """Return a column's first mean where `upper` is set, and its second elsewhere."""
    # torch.where() takes 5 to 8 ns an element on a CPU, for it cannot foresee a random bit; a mask
    # of all bits or none takes 0.5.
    above, below = means.view(torch.int32)[:, :, None]
    mask = upper.to(torch.int32).neg_()
    return mask.bitwise_and_(above ^ below).bitwise_xor_(below).view(torch.float32)


def _packed(bits: Bool[Tensor, " bits"]) -> Int32[Tensor, " words"]:
    """Return eight bits an octet; overwrites `bits`."""
    octets = bits.view(torch.int64).mul_(_COLLECT_OCTET) >> 56
    return octets.to(torch.uint8).view(torch.int32)


def _unpacked(words: Int32[Tensor, " words"]) -> Bool[Tensor, " bits"]:
    octets = words.contiguous().view(torch.uint8).to(torch.int64)
    # 127 more sets a byte's highest bit where there is one; the shift moves it to the lowest.
    isolated = octets.mul_(_EACH_BYTE).bitwise_and_(_ISOLATE_BITS)
    ones = isolated.add_(127 * _EACH_BYTE).bitwise_right_shift_(7).bitwise_and_(_EACH_BYTE)
    return ones.view(torch.bool)


STRIPE_PLACES = (AdaGradPlace.AGGREGATE, AdaGradPlace.SMOOTHED)
"""Where AdaGrad acts on a rank's stripe."""


@dataclass(frozen=True, slots=True)
class AdaGradState:
    """AdaGradState is the sum of the squares of each element's gradients, and of their weights.

    `normalized` changes both tensors in place.
    """

    squares: Float[Tensor, " elements"]
    weight: Float64[Tensor, ""]


def normalized(
    adagrad: AdaGrad, state: AdaGradState, gradients: Float[Tensor, " elements"]
) -> Float[Tensor, " elements"]:
    """Count the gradients in, then return g / (sqrt(mean of g^2) + epsilon)."""
    state.weight.mul_(adagrad.decay).add_(1)
    state.squares.mul_(adagrad.decay).addcmul_(gradients, gradients)
    deviation = (state.squares / state.weight).sqrt_().add_(adagrad.epsilon)
    return gradients / deviation


@dataclass(frozen=True, slots=True)
class RankState:
    """RankState is what a rank carries from one training step to the next, changed in place.

    `residual` is the first quantization's, of all elements. `stripe_residual` is the second's, and
    `velocity` the momentum, of the elements of the rank's stripe.
    """

    residual: Float[Tensor, " elements"]
    stripe_residual: Float[Tensor, " stripe_elements"]
    velocity: Float[Tensor, " stripe_elements"]
    adagrad: AdaGradState


@dataclass(frozen=True, slots=True)
class TwoStageAggregation:
    """TwoStageAggregation sums gradients, normalizes and smooths the sum, and quantizes it again.

    Momentum is v = momentum v + g, as torch's SGD has it. A smoothing with a factor 1 - momentum
    before g differs by that factor alone, which belongs to the learning rate.
    """

    stripes: tuple[Stripe, ...]
    momentum: float
    adagrad: AdaGrad

    def begin(self, rank: int, model: Float[Tensor, " elements"]) -> RankState:
        """Return a rank's state before its first step, on the device of the `model` vector.

        AdaGrad's squares are as long as what its place normalizes.
        """
        stripe, place = self.stripes[rank].of(model), self.adagrad.place
        normalized_like = stripe if place in STRIPE_PLACES else model
        squares = model[:0] if place is AdaGradPlace.NOWHERE else normalized_like
        weight = torch.zeros((), dtype=torch.float64, device=model.device)
        return RankState(
            torch.zeros_like(model),
            torch.zeros_like(stripe),
            torch.zeros_like(stripe),
            AdaGradState(torch.zeros_like(squares), weight),
        )

    def take_messages(
        self, state: RankState, gradients: Float[Tensor, " elements"]
    ) -> list[Int32[Tensor, " _"]]:
        """Quantize a rank's gradients for each rank that aggregates them, itself included."""
        gradients = self._normalized(AdaGradPlace.PARTIAL, state, gradients)
        return [
            take_message(stripe.of(state.residual), stripe.of(gradients), stripe.columns)
            for stripe in self.stripes
        ]

    def take_aggregate(
        self, rank: int, state: RankState, messages: Sequence[Int32[Tensor, " words"]]
    ) -> Int32[Tensor, " words"]:
        """Sum all ranks' messages about a rank's stripe, in their order; quantize the result.

        The sum is the only one of its stripe, so the ranks' models remain equal bit for bit.
        """
        columns, total = self.stripes[rank].columns, torch.zeros_like(state.velocity)
        for message in messages:
            add_message(total, message, columns)
        return take_message(state.stripe_residual, self._processed(state, total), columns)

    def update(
        self, messages: Sequence[Int32[Tensor, " _"]], like: Float[Tensor, " elements"]
    ) -> Float[Tensor, " elements"]:
        """Return the update from the second messages of ranks 0, 1, ..., in a vector as `like`."""
        update = torch.zeros_like(like)
        for stripe, message in zip(self.stripes, messages, strict=True):
            add_message(stripe.of(update), message, stripe.columns)
        return update

    def take_parts(
        self, state: RankState, gradients: Float[Tensor, " elements"]
    ) -> list[Float[Tensor, " _"]]:
        """Return a rank's gradients for each rank that aggregates them, without quantization."""
        gradients = self._normalized(AdaGradPlace.PARTIAL, state, gradients)
        return [stripe.of(gradients) for stripe in self.stripes]

    def take_sum(
        self, state: RankState, parts: Sequence[Float[Tensor, " stripe_elements"]]
    ) -> Float[Tensor, " stripe_elements"]:
        """Return a stripe's update from all ranks' parts, without quantization, in their order.

        AdaGrad's and the momentum's state are the same as of a quantized step; residuals remain.
        """
        total = torch.zeros_like(state.velocity)
        for part in parts:
            total.add_(part)
        return self._processed(state, total).clone()

    def unquantized_update(
        self, state: RankState, gradients: Float[Tensor, " elements"]
    ) -> Float[Tensor, " elements"]:
        """Return a single rank's update, in which nothing is quantized (Table 3, 1 GPU).

        It takes up both residuals, which resharding may have left of more ranks.
        """
        assert len(self.stripes) == 1
        gradients = self._normalized(AdaGradPlace.RAW, state, gradients)
        parts = [*self.take_parts(state, gradients), state.residual]
        update = self.take_sum(state, parts).add_(state.stripe_residual)
        state.residual.zero_()
        state.stripe_residual.zero_()
        return update

    def _processed(
        self, state: RankState, total: Float[Tensor, " stripe_elements"]
    ) -> Float[Tensor, " stripe_elements"]:
        """Return the update before the second quantization: AdaGrad, momentum (004 3.1)."""
        total = self._normalized(AdaGradPlace.AGGREGATE, state, total)
        state.velocity.mul_(self.momentum).add_(total)
        return self._normalized(AdaGradPlace.SMOOTHED, state, state.velocity)

    def _normalized(
        self, place: AdaGradPlace, state: RankState, gradients: Float[Tensor, " elements"]
    ) -> Float[Tensor, " elements"]:
        """Return the gradients, normalized if this is the place for it."""
        if place is not self.adagrad.place:
            return gradients
        return normalized(self.adagrad, state.adagrad, gradients)
