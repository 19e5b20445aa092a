"""Two-stage aggregation on simulated ranks: conservation, divergence, equal ranks, delays."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from training.algorithms.one_bit import (
    Columns,
    RankState,
    TwoStageAggregation,
    add_message,
    columns_of,
    num_message_words,
    stripes_of,
)
from training.settings.trainers import AdaGrad, AdaGradPlace

COLUMNS = columns_of({"weight": (6, 8), "bias": (6,), "output": (4, 6)})
SIZE = COLUMNS.num_elements
PLAIN = AdaGrad(place=AdaGradPlace.NOWHERE)

# Linear regression with targets of 0, one sample on each of three ranks: f_k(x) = (a_k x)^2 / 2.
# From START the gradients sum to 8 START, which points uphill, and their quantized values to
# -16 START: the mean of 10, 1 and 1 moves most of the 10 from the first half to the second.
SAMPLES = torch.tensor(
    [[10.0, -4, -4, -4, 1, 1], [-4.0, 10, -4, 1, -4, 1], [-4.0, -4, 10, 1, 1, -4]]
)
START = torch.tensor([1.0, 1, 1, -1, -1, -1])


class Ranks:
    """Ranks simulates K ranks; a message between two of them is an element of a list."""

    def __init__(
        self,
        num_ranks: int,
        columns: Columns = COLUMNS,
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


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_both_stages_together_lose_nothing(num_ranks: int) -> None:
    """Updates, and both residuals of all ranks, are the sum of all ranks' gradients."""
    ranks = Ranks(num_ranks)
    applied, total = torch.zeros(SIZE), torch.zeros(SIZE)
    for step in range(30):
        gradients = gradients_of(num_ranks, step)
        applied += ranks.update(gradients)
        total += torch.stack(gradients).sum(0)
    kept = torch.stack([state.residual for state in ranks.states]).sum(0)
    kept += torch.cat([state.stripe_residual for state in ranks.states])
    torch.testing.assert_close(applied + kept, total, rtol=0, atol=1e-3)


def losses_of(feedback: bool, learning_rate: float, num_steps: int) -> list[float]:
    """Return the loss after each step of regression on `SAMPLES`, with residuals or without."""
    ranks = Ranks(3, columns_of({"weight": (6,)}))
    model, losses = START.clone(), []
    for _ in range(num_steps):
        if not feedback:
            ranks.states = ranks.begin()
        model -= learning_rate * ranks.update([(a @ model) * a for a in SAMPLES])
        losses.append(float((SAMPLES @ model).square().sum() / 2))
    return losses


def test_training_diverges_without_error_feedback_alone() -> None:
    """Regression converges with residuals; without, the model grows by 1 + 16 lr in each step."""
    initial = float((SAMPLES @ START).square().sum() / 2)
    assert losses_of(True, 0.003, 400)[-1] < 1e-6 * initial
    without = losses_of(False, 0.003, 100)
    growth = (1 + 16 * 0.003) ** 2
    expected = [initial * growth**step for step in range(1, 101)]
    assert without == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("place", ["nowhere", "aggregate", "smoothed"])
def test_ranks_with_equal_gradients_are_one_with_their_sum(num_ranks: int, place: str) -> None:
    """K ranks that compute the same update as one rank with K times the gradient does, bitwise.

    Multiplication by 2 or 4 is exact, and stripes cut no column.
    """
    adagrad = AdaGrad(place=AdaGradPlace(place))
    many = Ranks(num_ranks, momentum=0.5, adagrad=adagrad)
    one = Ranks(1, momentum=0.5, adagrad=adagrad)
    for step in range(10):
        (gradient,) = gradients_of(1, step)
        assert torch.equal(many.update([gradient] * num_ranks), one.update([num_ranks * gradient]))


def test_momentum_is_that_of_torch_before_the_second_quantization() -> None:
    """Updates are SGD's with momentum on the whole vector, if both quantizations are exact."""
    columns = columns_of({"weight": (4, 2)})
    ranks = Ranks(2, columns, momentum=0.75)
    velocity = torch.zeros(8)
    for step in range(1, 6):
        # Columns of one positive and one negative element are exact in one bit each.
        gradient = step * torch.tensor([3.0, -1.0] * 4)
        velocity = 0.75 * velocity + 2 * gradient
        assert torch.equal(ranks.update([gradient] * 2), velocity)


def test_messages_have_the_lengths_that_a_trainer_allocates() -> None:
    """To each rank, the words of its stripe; both stages carry M bits and 64 more a column."""
    ranks = Ranks(3)
    expected = [num_message_words(stripe.columns) for stripe in ranks.aggregation.stripes]
    sent = ranks.aggregation.take_messages(ranks.states[0], torch.ones(SIZE))
    assert [len(message) for message in sent] == expected
    assert [len(m) for m in ranks.second_messages(gradients_of(3, 0))] == expected


def test_more_ranks_than_columns_aggregate_nothing() -> None:
    """Ranks without a stripe send empty messages, and the update is that of fewer ranks."""
    columns = columns_of({"weight": (2, 3)})
    many, two = Ranks(5, columns), Ranks(2, columns)
    gradient, zero = gradients_of(2, 0, size=6), torch.zeros(6)
    expected = two.update(gradient)
    assert torch.equal(many.update([*gradient, zero, zero, zero]), expected)


@pytest.mark.parametrize("place", ["nowhere", "aggregate", "smoothed", "partial"])
def test_all_ranks_see_a_gradient_that_is_not_finite(place: str) -> None:
    """A NaN or an infinity on one rank shows in a second message, which every rank receives."""
    for bad in (float("nan"), float("inf")):
        ranks = Ranks(3, momentum=0.9, adagrad=AdaGrad(place=AdaGradPlace(place)))
        gradients = gradients_of(3, 0)
        gradients[1][5] = bad
        found = []
        for message, stripe in zip(
            ranks.second_messages(gradients), ranks.aggregation.stripes, strict=True
        ):
            total = torch.zeros(stripe.columns.num_elements)
            add_message(total, message, stripe.columns)
            found.append(bool(total.isfinite().all()))
        assert found == [False, True, True]


def numpy_quantized(residual: np.ndarray, vector: np.ndarray) -> np.ndarray:
    """Quantize the rows of a matrix with error feedback."""
    total = residual + vector
    upper = total >= 0
    sent = np.zeros_like(total)
    for side in (upper, ~upper):
        counts = np.maximum(side.sum(1, keepdims=True), 1)
        sent += side * ((total * side).sum(1, keepdims=True) / counts)
    residual[:] = total - sent
    return sent


def numpy_delayed_sgd(
    gradient: Callable[[np.ndarray, int, int], np.ndarray], num_ranks: int, num_halves: int
) -> list[np.ndarray]:
    """Return the models W(h + 1) = W(h) - lr Q(sum of Q(G_k at W(h - 1))) after each half."""
    models = [np.zeros((6, 8)), np.zeros((6, 8))]
    first, second = np.zeros((num_ranks, 6, 8)), np.zeros((6, 8))
    for half in range(num_halves):
        stale = models[half]
        sent = [numpy_quantized(first[k], gradient(stale, k, half)) for k in range(num_ranks)]
        models.append(models[-1] - 0.05 * numpy_quantized(second, sum(sent, np.zeros((6, 8)))))
    return models[2:]


def test_double_buffering_is_delayed_sgd() -> None:
    """Exchange a half while the next is computed: the model lacks one half's update (004 2.2).

    A reference in NumPy has neither stripes nor messages, and knows the delay alone.
    """
    num_ranks, num_halves = 3, 24
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=(num_ranks, num_halves, 8))
    targets = generator.normal(size=(num_ranks, num_halves, 6))

    def gradient(model: np.ndarray, rank: int, half: int) -> np.ndarray:
        return np.outer(model @ inputs[rank, half] - targets[rank, half], inputs[rank, half])

    ranks = Ranks(num_ranks, columns_of({"weight": (6, 8)}))
    ranks.model = ranks.model.double()
    ranks.states = ranks.begin()
    model, models, in_flight = ranks.model.clone(), [], []
    for half in range(num_halves):
        at = model.view(6, 8).numpy()
        computed = [torch.from_numpy(gradient(at, k, half).ravel()) for k in range(num_ranks)]
        # The exchange of the half before has ended; that of this one begins.
        if in_flight:
            model = model - 0.05 * ranks.aggregation.update(in_flight, model)
            models.append(model)
        in_flight = ranks.second_messages(computed)
    expected = numpy_delayed_sgd(gradient, num_ranks, num_halves - 1)
    np.testing.assert_allclose(torch.stack(models).view(-1, 6, 8).numpy(), expected, atol=1e-5)
    assert np.abs(expected[-1]).max() > 0.1
