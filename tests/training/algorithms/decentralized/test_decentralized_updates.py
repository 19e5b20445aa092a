"""Updates of decentralized SGD: eq. (2), the mean of the models, and delayed SGD."""

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.papers.mixing_theory import pair_matrix, ring_matrix
from training.algorithms.mixing import (
    Ring,
    drawn_partner,
    exchanged_weights,
    fixed_ring,
    mixed_weights,
    permuted_ring,
)

SIZES = st.integers(1, 9)
SEEDS = st.integers(0, 2**32)
ALPHA = 0.1
NUM_ELEMENTS = 4
UNIT_ROUNDOFF = Fraction(1, 2**24)


def local_update(mixed: Tensor, gradient: Tensor, learning_rate: float) -> Tensor:
    """Return a column of eq. (2): the mixed weights less alpha_k times the rank's own gradient."""
    return torch.add(mixed, gradient, alpha=-learning_rate)


def mixed_by(ring: Ring, models: Sequence[Tensor]) -> list[Tensor]:
    """Return every rank's mixed weights."""
    return [
        mixed_weights({other: models[other] for other in (rank, *ring.neighbours(rank))})
        for rank in range(len(models))
    ]


def mixed_uniformly(models: Sequence[Tensor]) -> list[Tensor]:
    """Return every rank's mixed weights by T_u."""
    return [mixed_weights(dict(enumerate(models))) for _ in models]


def random_models(num_ranks: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(num_ranks, NUM_ELEMENTS, dtype=dtype, generator=generator))


def gradient(model: Tensor, rank: int, step: int) -> Tensor:
    """Return the gradient of a loss that is not quadratic, and another on each rank and step."""
    minibatch = torch.randn(
        6, len(model), dtype=model.dtype, generator=torch.Generator().manual_seed(97 * step + rank)
    )
    parameter = model.clone().requires_grad_()
    torch.nn.functional.softplus(minibatch @ parameter - rank).mean().backward()
    assert parameter.grad is not None
    return parameter.grad


def affine_gradient(model: Tensor, rank: int, step: int) -> Tensor:
    """Return the gradient of a quadratic loss with the same curvature on all ranks."""
    minimum = torch.randn(
        len(model), dtype=model.dtype, generator=torch.Generator().manual_seed(31 * step + rank)
    )
    return torch.arange(1, len(model) + 1) * (model - minimum)


def stacked(models: Sequence[Tensor]) -> np.ndarray:
    """Return W, a column for each rank."""
    return torch.stack(list(models), dim=1).numpy()


@given(SIZES, SEEDS)
def test_a_round_is_eq_2(num_ranks: int, seed: int) -> None:
    """Ranks that mix and update on their own compute W T - alpha g in NumPy's matrices."""
    models = random_models(num_ranks, seed)
    gradients = [gradient(model, rank, seed) for rank, model in enumerate(models)]
    for ring in (fixed_ring(num_ranks), permuted_ring(seed, 4, num_ranks)):
        rounds = zip(mixed_by(ring, models), gradients, strict=True)
        found = stacked([local_update(mixed, each, ALPHA) for mixed, each in rounds])
        expected = stacked(models) @ ring_matrix(ring) - ALPHA * stacked(gradients)
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


@given(st.data(), SIZES, SEEDS)
def test_mixing_keeps_the_sum_of_thirds_exactly(
    data: st.DataObject, num_ranks: int, seed: int
) -> None:
    """In float32 multiples of 3^k 2^j below 2^24 lose nothing in k rounds of rings of three."""
    ring, num_rounds = permuted_ring(seed, 0, num_ranks), 4
    multiple = 2**num_rounds if num_ranks == 2 else 3**num_rounds
    values = data.draw(
        st.lists(st.integers(-10_000, 10_000), min_size=num_ranks, max_size=num_ranks)
    )
    models = [torch.tensor([float(value * multiple)]) for value in values]
    for _ in range(num_rounds):
        models = mixed_by(ring, models)
        assert sum(int(model) for model in models) == multiple * sum(values)
        assert all(float(model).is_integer() for model in models)


FLOATS = st.floats(-1e6, 1e6, width=32).filter(lambda value: value == 0 or abs(value) > 1e-30)


@given(st.lists(FLOATS, min_size=1, max_size=9), SEEDS)
def test_mixing_moves_the_mean_within_its_rounding(values: list[float], seed: int) -> None:
    """In float32 by at most n u / (1 - n u) of the mean magnitude, computed in fractions."""
    models = [torch.tensor([value], dtype=torch.float32) for value in values]
    mixed = mixed_by(permuted_ring(seed, 1, len(values)), models)
    change = sum(Fraction(float(model)) for model in mixed) - sum(map(Fraction, values))
    num_averaged = min(len(values), 3)
    rounding = num_averaged * UNIT_ROUNDOFF / (1 - num_averaged * UNIT_ROUNDOFF)
    assert abs(change) <= rounding * sum(abs(Fraction(value)) for value in values)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_with_the_same_neighbours_get_the_same_bits(num_ranks: int) -> None:
    """Sums are in the order of the ranks, whatever the ring's order and the messages' order."""
    models = random_models(num_ranks, 8, torch.float32)
    mixed = [
        *mixed_by(fixed_ring(num_ranks), models),
        *mixed_by(permuted_ring(2, 3, num_ranks), models),
        mixed_weights(dict(reversed(list(enumerate(models))))),
    ]
    assert all(torch.equal(each, mixed[0]) for each in mixed)


def test_mixing_sums_in_ascending_order_of_ranks() -> None:
    """(2^24 + 1) + 1 loses both ones in float32, (1 + 1) + 2^24 none; division is rounded once."""
    large, one = torch.tensor([2.0**24]), torch.ones(1)
    assert mixed_weights({5: one, 2: large, 9: one}) == np.float32(2.0**24) / np.float32(3)
    assert mixed_weights({2: one, 5: one, 9: large}) == np.float32(2.0**24 + 2) / np.float32(3)


def test_mixing_leaves_its_arguments_alone() -> None:
    """Messages may still be on their way while models are mixed; alone a model is copied."""
    models = random_models(3, 1)
    before = [model.clone() for model in models]
    mixed = mixed_weights(dict(enumerate(models)))
    alone = mixed_weights({0: models[0]})
    mixed += 1
    alone += 1
    assert all(map(torch.equal, models, before))


Gradient = Callable[[Tensor, int, int], Tensor]


def train_d1d(slope: Gradient, num_ranks: int, num_steps: int, *, as_printed: bool) -> np.ndarray:
    """Return the mean models of D1D-PSGD; the gradients' models are W_{k-1} T_u or W_{k-1}."""
    models = earlier = random_models(1, 6) * num_ranks
    means = []
    for step in range(num_steps):
        gradients = [slope(model, rank, step) for rank, model in enumerate(earlier)]
        mixed = mixed_uniformly(models)
        earlier = models if as_printed else mixed
        models = [local_update(*each, ALPHA) for each in zip(mixed, gradients, strict=True)]
        means.append(stacked(models).mean(1))
    return np.array(means)


def delayed_sgd(slope: Gradient, num_ranks: int, num_steps: int) -> np.ndarray:
    """Return NumPy's models w_{k+1} = w_k - alpha g(w_{k-1}), g the mean of ranks' gradients."""
    history = [random_models(1, 6)[0].numpy()] * 2
    for step in range(num_steps):
        delayed = torch.from_numpy(history[-2])
        slopes = [slope(delayed, rank, step).numpy() for rank in range(num_ranks)]
        history.append(history[-1] - ALPHA * np.mean(slopes, axis=0))
    return np.array(history[2:])


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
def test_the_mean_of_d1d_is_delayed_sgd(num_ranks: int) -> None:
    """With gradients at the last all-reduce's result, for any loss, within 1e-12."""
    found = train_d1d(gradient, num_ranks, 30, as_printed=False)
    np.testing.assert_allclose(found, delayed_sgd(gradient, num_ranks, 30), rtol=0, atol=1e-12)


def test_eq_14_as_printed_is_delayed_sgd_for_affine_gradients_alone() -> None:
    """With gradients at W_{k-1}, the mean is delayed SGD of a quadratic loss, not of any other."""
    expected = delayed_sgd(affine_gradient, 4, 30)
    found = train_d1d(affine_gradient, 4, 30, as_printed=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    difference = train_d1d(gradient, 4, 30, as_printed=True) - delayed_sgd(gradient, 4, 30)
    assert np.abs(difference).max() > 1e-5


@given(SEEDS)
def test_an_exchange_without_gradients_averages_the_pair(seed: int) -> None:
    """Then W T has AD-PSGD's pair in T, within rounding."""
    models = random_models(4, seed)
    partner = drawn_partner(seed, 2, 0, 4)
    mixed = list(models)
    mixed[2] = exchanged_weights(models[2], models[2], models[partner])
    mixed[partner] = exchanged_weights(models[partner], models[partner], models[2])
    expected = stacked(models) @ pair_matrix(4, 2, partner)
    np.testing.assert_allclose(stacked(mixed), expected, rtol=1e-14, atol=1e-14)


def test_an_exchange_keeps_the_gradients_applied_meanwhile() -> None:
    """Eq. (2): the average of what was sent and received, less the update since then."""
    sent, received, update = torch.tensor([2.0]), torch.tensor([6.0]), torch.tensor([0.5])
    assert exchanged_weights(sent - update, sent, received) == 3.5
    assert exchanged_weights(received, received, sent) == 4.0


@given(
    st.lists(
        st.tuples(st.sampled_from(["gradient", "send", "answer"]), st.integers(0, 3)), max_size=60
    )
)
def test_no_order_of_exchanges_and_gradients_loses_an_update(events: list[tuple[str, int]]) -> None:
    """The sum of four models is that of all updates, exactly: float64 holds integers' halves.

    Ranks 0 and 2 send their models to 1 and 3; a passive rank answers later, with its model of
    that time, and the active rank takes the answer at its next event.
    """
    models = [torch.tensor([float(4**rank)], dtype=torch.float64) for rank in range(4)]
    total, sent, answers = float(sum(models)), dict[int, Tensor](), dict[int, Tensor]()
    for number, (event, rank) in enumerate(events):
        active = rank - rank % 2
        if event == "gradient":
            models[rank] = local_update(models[rank], torch.full_like(models[rank], number), 1.0)
            total -= number
        elif event == "send" and active not in sent:
            sent[active] = models[active]
        elif event == "answer" and active in answers:
            models[active] = exchanged_weights(
                models[active], sent.pop(active), answers.pop(active)
            )
        elif event == "answer" and active in sent:
            answers[active] = models[active + 1]
            models[active + 1] = exchanged_weights(
                models[active + 1], models[active + 1], sent[active]
            )
    for active, answer in answers.items():
        models[active] = exchanged_weights(models[active], sent[active], answer)
    assert float(sum(models)) == total
