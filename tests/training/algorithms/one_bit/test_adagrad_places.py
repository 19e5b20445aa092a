"""AdaGrad: its equation against torch's, and the place at which each kind acts."""

import pytest
import torch
from torch import Tensor

from training.algorithms.one_bit import TwoStageAggregation, columns_of, first_state, stripes_of
from training.algorithms.one_bit import normalized as adagrad_normalized
from training.settings.trainers import AdaGrad, AdaGradPlace

COLUMNS = columns_of({"weight": (6, 8), "bias": (6,)})
NUM_RANKS = 3


def gradients_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(COLUMNS.num_elements, generator=generator)


def normalized(adagrad: AdaGrad, gradients: list[Tensor]) -> list[Tensor]:
    """Return what one state makes of successive gradients."""
    state = first_state(adagrad, gradients[0], gradients[0])
    return [adagrad_normalized(adagrad, state, each) for each in gradients]


def test_over_time_it_is_duchis_times_the_root_of_the_steps() -> None:
    """torch.optim.Adagrad moves by 1 / sqrt(t) of the normalized gradient."""
    gradients = [gradients_of(0, step) for step in range(20)]
    model = torch.nn.Parameter(torch.zeros(COLUMNS.num_elements))
    optimizer = torch.optim.Adagrad([model], lr=1.0, eps=1e-10)
    for step, update in enumerate(normalized(AdaGrad(), gradients), 1):
        before = model.detach().clone()
        model.grad = gradients[step - 1].clone()
        optimizer.step()
        torch.testing.assert_close(before - model.detach(), update / step**0.5)


def test_recent_samples_have_the_weight_of_their_age() -> None:
    """With decay d the mean of squares weighs a gradient of n steps before by d^n."""
    gradients = [gradients_of(0, step) for step in range(5)]
    weights = torch.tensor([0.5**age for age in (4, 3, 2, 1, 0)]).double()
    squares = torch.stack(gradients).double().square()
    expected = gradients[-1] / ((weights @ squares) / weights.sum()).sqrt()
    update = normalized(AdaGrad(decay=0.5), gradients)[-1]
    torch.testing.assert_close(update, expected.float())


def test_the_scale_of_gradients_does_not_matter() -> None:
    """A thousandth of all gradients gives the same; an element without any stays 0."""
    gradients = [gradients_of(0, step) for step in range(3)]
    for each in gradients:
        each[4] = 0
    large = normalized(AdaGrad(), gradients)
    small = normalized(AdaGrad(), [each / 1000 for each in gradients])
    torch.testing.assert_close(large, small)
    assert [each[4] for each in large] == [0, 0, 0]
    assert torch.equal(large[0], gradients[0].sign())


def updates_at(place: AdaGradPlace, num_steps: int = 4) -> list[Tensor]:
    """Return the updates of three ranks whose AdaGrad acts at a place."""
    stripes = stripes_of(COLUMNS, NUM_RANKS)
    aggregation = TwoStageAggregation(stripes, 0.5, AdaGrad(place=place))
    model = torch.zeros(COLUMNS.num_elements)
    states = [aggregation.begin(rank, model) for rank in range(NUM_RANKS)]
    updates = []
    for step in range(num_steps):
        sent = [
            aggregation.take_messages(state, gradients_of(rank, step))
            for rank, state in enumerate(states)
        ]
        second = [
            aggregation.take_aggregate(rank, state, [messages[rank] for messages in sent])
            for rank, state in enumerate(states)
        ]
        updates.append(aggregation.update(second, model))
    return updates


def quantized(residual: Tensor, vector: Tensor) -> Tensor:
    """Quantize by columns with feedback, a column at a time."""
    residual += vector
    sent = torch.empty_like(vector)
    sizes = [8] * 6 + [6]
    for column, result in zip(residual.split(sizes), sent.split(sizes), strict=True):
        for side in (column >= 0, column < 0):
            result[side] = column[side].mean() if side.any() else 0
        column.sub_(result)
    return sent


def expected_at(place: AdaGradPlace, num_steps: int = 4) -> list[Tensor]:
    """Compute the same by equations on whole vectors, with no stripes and no messages."""
    zeros = torch.zeros(COLUMNS.num_elements)
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
            gradient = gradients_of(rank, step)
            if place is AdaGradPlace.PARTIAL:
                gradient = divided(rank, gradient, step)
            total += quantized(first[rank], gradient)
        if place is AdaGradPlace.AGGREGATE:
            total = divided("total", total, step)
        velocity = 0.5 * velocity + total
        processed = velocity
        if place is AdaGradPlace.SMOOTHED:
            processed = divided("total", velocity, step)
        updates.append(quantized(second, processed))
    return updates


@pytest.mark.parametrize("place", [place for place in AdaGradPlace if place.value != "raw"])
def test_each_place_is_where_table_3_has_it(place: AdaGradPlace) -> None:
    """Before quantization, before momentum or after it: as equations on whole vectors."""
    torch.testing.assert_close(updates_at(place), expected_at(place), rtol=1e-4, atol=1e-4)


def test_the_raw_place_needs_one_rank_which_quantizes_nothing() -> None:
    """Alone, it normalizes and smooths the gradient itself; among others it is refused."""
    raw = AdaGrad(place=AdaGradPlace.RAW)
    aggregation = TwoStageAggregation(stripes_of(COLUMNS, 1), 0.5, raw)
    state = aggregation.begin(0, torch.zeros(COLUMNS.num_elements))
    gradients = [gradients_of(0, step) for step in range(2)]
    once, twice = (aggregation.unquantized_update(state, each) for each in gradients)
    alone = normalized(raw, gradients)
    torch.testing.assert_close([once, twice], [alone[0], 0.5 * alone[0] + alone[1]])
    with pytest.raises(ValueError, match=r"^AdaGrad of the raw gradient on 2 ranks: need 1 rank"):
        TwoStageAggregation(stripes_of(COLUMNS, 2), 0.5, raw)


def test_the_aggregate_is_the_default_and_has_a_stripes_state() -> None:
    """An owner's state is as long as its stripe, a rank's own as the model, none's empty."""
    model = torch.zeros(COLUMNS.num_elements)
    stripes = stripes_of(COLUMNS, NUM_RANKS)
    stripe = stripes[1].columns.num_elements
    assert TwoStageAggregation(stripes).adagrad.place is AdaGradPlace.AGGREGATE
    for place, expected in (
        ("aggregate", stripe),
        ("smoothed", stripe),
        ("partial", 54),
        ("nowhere", 0),
    ):
        state = TwoStageAggregation(stripes, adagrad=AdaGrad(place=AdaGradPlace(place))).begin(
            1, model
        )
        assert len(state.adagrad.squares) == expected
        assert (len(state.residual), len(state.velocity), len(state.stripe_residual)) == (
            54,
            stripe,
            stripe,
        )


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"decay": 0.0}, r"^decay = 0\.0: need 0\.001\.\.1"),
        ({"epsilon": 0.0}, r"^epsilon = 0\.0: need"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, float], problem: str) -> None:
    """The message names the value and the range."""
    with pytest.raises(ValueError, match=problem):
        AdaGrad(**settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^momentum = 1\.0: need 0 or more, below 1"):
        TwoStageAggregation(stripes_of(COLUMNS, 1), 1.0)
