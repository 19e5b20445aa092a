"""1-bit SGD: columns and stripes, messages, aggregation in two stages, and AdaGrad's places.

Equations and tables are those of paper 004.
"""

import itertools
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from training.algorithms import one_bit as module
from training.algorithms.one_bit import (
    AdaGradState,
    Columns,
    RankState,
    TwoStageAggregation,
    add_message,
    columns_of,
    stripes_of,
    take_message,
)
from training.algorithms.one_bit import normalized as adagrad_normalized
from training.settings.trainers import AdaGrad, AdaGradPlace

CPU = torch.device("cpu")


def columns_of_module(module: nn.Module) -> Columns:
    return columns_of({name: tuple(p.shape) for name, p in module.named_parameters()})


def of_runs(*runs: tuple[int, int]) -> Columns:
    """Return so many columns of a size, run by run."""
    return Columns(np.cumsum([0, *(size for number, size in runs for _ in range(number))]))


def runs_of(columns: Columns) -> list[tuple[int, int]]:
    """Return how many columns of one size follow each other."""
    sizes = itertools.groupby(np.diff(columns.bounds).tolist())
    return [(len(list(run)), size) for size, run in sizes]


def test_a_column_is_the_weights_into_one_output_unit() -> None:
    """A row of weights is what the unit's output depends on; the bias is one column."""
    linear = nn.Linear(5, 3)
    columns = columns_of_module(linear)
    assert runs_of(columns) == [(3, 5), (1, 3)]
    vector = nn.utils.parameters_to_vector(linear.parameters()).detach()
    rows = {block.column_size: block.rows(vector) for block in columns.blocks(vector.device)}
    inputs = torch.randn(5)
    torch.testing.assert_close(rows[5] @ inputs + rows[3][0], linear(inputs))


@pytest.mark.parametrize(("kind", "num_gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
def test_stacked_gates_have_biases_of_their_own(kind: type[nn.RNNBase], num_gates: int) -> None:
    """An LSTM's two biases are four columns each, one a gate, in both directions; a GRU's three."""
    columns = columns_of_module(kind(6, 5, 2, bidirectional=True))
    gates = of_runs(
        *(
            run
            for num_inputs in (6, 10)
            for _ in ("forward", "backward")
            for run in ((5 * num_gates, num_inputs), (5 * num_gates, 5), (2 * num_gates, 5))
        )
    )
    assert runs_of(columns) == runs_of(gates)


def test_gates_are_found_with_a_projection_below_other_names_and_in_cells() -> None:
    """weight_hh is then not square in its gates, or has no layer, or the module has a name."""
    projected = columns_of_module(nn.ModuleDict({"x": nn.LSTM(6, 8, proj_size=3)}))
    # The last are 8 biases and the 3 outputs of the projection.
    assert runs_of(projected) == [(4 * 8, 6), (4 * 8, 3), (8 + 3, 8)]
    assert runs_of(columns_of_module(nn.LSTMCell(6, 8))) == [(4 * 8, 6), (4 * 8 + 8, 8)]


def test_other_tensors_have_a_column_an_output_channel() -> None:
    """Filters are columns; tensors of one column, one element or none have no more than one."""
    shapes = {"filters": (8, 4, 3), "vector": (5,), "scalar": (), "thin": (6, 1), "empty": (0, 3)}
    assert runs_of(columns_of(shapes)) == [(8, 12), (1, 5), (1, 1), (1, 6)]


def test_biases_alone_are_one_column() -> None:
    """A bias whose layer has frozen weights, or that only has an LSTM's name, is not cut."""
    assert runs_of(columns_of({"bias_hh_l0": (8,)})) == [(1, 8)]
    odd = columns_of({"weight_hh": (5, 2), "bias_hh": (5,)})
    assert runs_of(odd) == [(5, 2), (1, 5)]


MATRICES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=1, max_size=6)


@given(MATRICES, st.integers(1, 12))
def test_stripes_are_whole_columns_and_balanced(
    sizes: list[tuple[int, int]], num_ranks: int
) -> None:
    """Stripes cover the vector in order; each has M / K elements but for the longest column's."""
    columns = of_runs(*sizes)
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
        assert np.diff(stripe.columns.bounds).tolist() == [lengths[n] for n in part.unique()]


@given(MATRICES, st.integers(1, 200), st.integers(0, 100))
def test_blocks_hold_every_column_once(
    sizes: list[tuple[int, int]], max_block: int, min_slice: int
) -> None:
    """Whatever is a slice, gathered or cut: all rows of a block are whole columns of one size."""
    columns = of_runs(*sizes)
    column_numbers = torch.arange(columns.num_columns)
    of_elements = column_numbers.repeat_interleave(torch.from_numpy(np.diff(columns.bounds)))
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


COLUMNS = of_runs((3, 5), (1, 7), (40, 33))


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
    result = np.empty_like(vector)
    for begin, end in pairwise(columns.bounds):
        column = vector[begin:end]
        for side in (column >= 0, column < 0):
            if side.any():
                result[begin:end][side] = column[side].mean()
    return result


def test_values_beat_every_other_pair_and_every_column_has_its_own() -> None:
    """A pair moved by 1 % in any direction raises the column's error; columns differ."""
    columns = of_runs((40, 33))
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
    columns = of_runs((1, size))
    vector = random_vector(seed, columns)
    message = take_message(torch.zeros(size), vector, columns)
    bits = np.unpackbits(message[2:].numpy().view(np.uint8), bitorder="little")
    assert np.array_equal(bits[:size], (vector >= 0).numpy())
    assert not bits[size:].any()
    assert torch.equal(decoded(message, columns) >= 0, vector >= 0)


def test_equal_signs_zeros_and_no_elements() -> None:
    """A side without elements has the value 0; zeros of both signs are above; none is a message."""
    for column in ([1.0, 3.0], [-1.0, -3.0], [0.0, -0.0], [5.0]):
        columns = of_runs((1, len(column)))
        vector = torch.tensor(column)
        assert torch.equal(quantized(vector, columns), vector.mean().expand(len(column)))
    assert torch.equal(quantized(torch.zeros(0), of_runs()), torch.zeros(0))


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


MODEL_COLUMNS = columns_of({"weight": (6, 8), "bias": (6,), "output": (4, 6)})
SIZE = MODEL_COLUMNS.num_elements
PLAIN = AdaGrad(place=AdaGradPlace.NOWHERE)


class Ranks:
    """Ranks simulates K ranks; a message between two of them is an element of a list."""

    def __init__(
        self,
        num_ranks: int,
        columns: Columns = MODEL_COLUMNS,
        momentum: float = 0.0,
        adagrad: AdaGrad = PLAIN,
    ) -> None:
        self.aggregation = TwoStageAggregation(stripes_of(columns, num_ranks), momentum, adagrad)
        self.model = torch.zeros(columns.num_elements)
        self.states = self.begin()

    def begin(self) -> list[RankState]:
        ranks = range(len(self.aggregation.stripes))
        return [self.aggregation.begin(rank, self.model) for rank in ranks]

    def second_messages(self, gradients: list[Tensor]) -> list[Tensor]:
        pairs = zip(self.states, gradients, strict=True)
        sent = [self.aggregation.take_messages(state, each) for state, each in pairs]
        return [
            self.aggregation.take_aggregate(rank, state, [messages[rank] for messages in sent])
            for rank, state in enumerate(self.states)
        ]

    def update(self, gradients: list[Tensor]) -> Tensor:
        return self.aggregation.update(self.second_messages(gradients), self.model)


def gradients_of(num_ranks: int, step: int, size: int = SIZE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(size, generator=generator) for _ in range(num_ranks)]


def test_more_ranks_than_columns_aggregate_nothing() -> None:
    """Ranks without a stripe send empty messages, and the update is that of fewer ranks."""
    columns = columns_of({"weight": (2, 3)})
    many, two = Ranks(5, columns), Ranks(2, columns)
    gradient, zero = gradients_of(2, 0, size=6), torch.zeros(6)
    expected = two.update(gradient)
    assert torch.equal(many.update([*gradient, zero, zero, zero]), expected)


SMALL_COLUMNS = columns_of({"weight": (6, 8), "bias": (6,)})
NUM_RANKS = 3


def gradient_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(SMALL_COLUMNS.num_elements, generator=generator)


def normalized(adagrad: AdaGrad, gradients: list[Tensor]) -> list[Tensor]:
    """Return what one state makes of successive gradients."""
    state = AdaGradState(torch.zeros_like(gradients[0]), torch.zeros((), dtype=torch.float64))
    return [adagrad_normalized(adagrad, state, each) for each in gradients]


def test_over_time_it_is_duchis_times_the_root_of_the_steps() -> None:
    """torch.optim.Adagrad moves by 1 / sqrt(t) of the normalized gradient."""
    gradients = [gradient_of(0, step) for step in range(20)]
    model = torch.nn.Parameter(torch.zeros(SMALL_COLUMNS.num_elements))
    optimizer = torch.optim.Adagrad([model], lr=1.0, eps=1e-10)
    for step, update in enumerate(normalized(AdaGrad(), gradients), 1):
        before = model.detach().clone()
        model.grad = gradients[step - 1].clone()
        optimizer.step()
        torch.testing.assert_close(before - model.detach(), update / step**0.5)


def test_recent_samples_have_the_weight_of_their_age() -> None:
    """With decay d the mean of squares weighs a gradient of n steps before by d^n."""
    gradients = [gradient_of(0, step) for step in range(5)]
    weights = torch.tensor([0.5**age for age in (4, 3, 2, 1, 0)]).double()
    squares = torch.stack(gradients).double().square()
    expected = gradients[-1] / ((weights @ squares) / weights.sum()).sqrt()
    update = normalized(AdaGrad(decay=0.5), gradients)[-1]
    torch.testing.assert_close(update, expected.float())


def updates_at(place: AdaGradPlace, num_steps: int = 4) -> list[Tensor]:
    """Return the updates of three ranks whose AdaGrad acts at a place."""
    ranks = Ranks(NUM_RANKS, SMALL_COLUMNS, 0.5, AdaGrad(place=place))
    return [
        ranks.update([gradient_of(rank, step) for rank in range(NUM_RANKS)])
        for step in range(num_steps)
    ]


def quantized_by_columns(residual: Tensor, vector: Tensor) -> Tensor:
    """Quantize by columns with feedback, a column at a time."""
    residual += vector
    sent = torch.from_numpy(reference(residual.numpy(), SMALL_COLUMNS))
    residual -= sent
    return sent


def expected_at(place: AdaGradPlace, num_steps: int = 4) -> list[Tensor]:
    """Compute the same by equations on whole vectors, with no stripes and no messages."""
    zeros = torch.zeros(SMALL_COLUMNS.num_elements)
    first = [zeros.clone() for _ in range(NUM_RANKS)]
    second, velocity = zeros.clone(), zeros.clone()
    squares = {key: zeros.clone() for key in ("total", *range(NUM_RANKS))}

    def divided(key: object, vector: Tensor, step: int) -> Tensor:
        squares[key] += vector**2  # type: ignore[index]
        return vector / (squares[key] / (step + 1)).sqrt()  # type: ignore[index]

    updates = []
    for step in range(num_steps):
        total = zeros.clone()
        for rank in range(NUM_RANKS):
            gradient = gradient_of(rank, step)
            if place is AdaGradPlace.PARTIAL:
                gradient = divided(rank, gradient, step)
            total += quantized_by_columns(first[rank], gradient)
        if place is AdaGradPlace.AGGREGATE:
            total = divided("total", total, step)
        velocity = 0.5 * velocity + total
        processed = velocity
        if place is AdaGradPlace.SMOOTHED:
            processed = divided("total", velocity, step)
        updates.append(quantized_by_columns(second, processed))
    return updates


@pytest.mark.parametrize("place", [place for place in AdaGradPlace if place.value != "raw"])
def test_each_place_is_where_table_3_has_it(place: AdaGradPlace) -> None:
    """Before quantization, before momentum or after it: as equations on whole vectors."""
    torch.testing.assert_close(updates_at(place), expected_at(place), rtol=1e-4, atol=1e-4)


def test_the_raw_place_needs_one_rank_which_quantizes_nothing() -> None:
    """Alone, it normalizes and smooths the gradient itself; among others it is refused."""
    raw = AdaGrad(place=AdaGradPlace.RAW)
    aggregation = TwoStageAggregation(stripes_of(SMALL_COLUMNS, 1), 0.5, raw)
    state = aggregation.begin(0, torch.zeros(SMALL_COLUMNS.num_elements))
    gradients = [gradient_of(0, step) for step in range(2)]
    once, twice = (aggregation.unquantized_update(state, each) for each in gradients)
    alone = normalized(raw, gradients)
    torch.testing.assert_close([once, twice], [alone[0], 0.5 * alone[0] + alone[1]])
