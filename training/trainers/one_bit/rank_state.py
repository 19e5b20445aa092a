"""Keep what a rank of 1-bit SGD carries between steps, in checkpoints and for other tensors."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxtyping import Float
from torch import Tensor

from training.algorithms.one_bit.adagrad import AdaGradState
from training.algorithms.one_bit.aggregation import RankState, TwoStageAggregation
from training.algorithms.one_bit.columns import Stripe, columns_of, stripes_of
from training.configuration.trainers import AdaGradPlace
from training.trainers.one_bit.message_exchange import MessageExchange
from training.trainers.replica.parameters import FlatParameters
from training.trainers.resharding import EntryPath, ReshardingPlan, Rule, State

STRIPE_PLACES = (AdaGradPlace.AGGREGATE, AdaGradPlace.SMOOTHED)
"""Where AdaGrad acts on a rank's stripe."""


def stripes_for(named: Mapping[str, Tensor], num_ranks: int) -> tuple[Stripe, ...]:
    """Return each rank's stripe of parameters that lie one after the other."""
    return stripes_of(columns_of({name: p.shape for name, p in named.items()}), num_ranks)


def state_entries(state: RankState, layout: FlatParameters) -> dict[str, Any]:
    """Copy a rank's state to a checkpoint's entries."""
    return {
        "residuals": layout.by_name(state.residual),
        "stripe_residual": state.stripe_residual.clone(),
        "velocity": state.velocity.clone(),
        "squares": state.adagrad.squares.clone(),
        "weight": state.adagrad.weight.clone(),
    }


def restored(entries: Mapping[str, Any], layout: FlatParameters, like: RankState) -> RankState:
    """Invert `state_entries`, on the device of `like`."""
    like.residual.copy_(layout.flatten(entries["residuals"]))
    like.stripe_residual.copy_(entries["stripe_residual"])
    like.velocity.copy_(entries["velocity"])
    like.adagrad.squares.copy_(entries["squares"])
    like.adagrad.weight.copy_(entries["weight"])
    return like


def carried_over(
    state: RankState,
    old: FlatParameters,
    new: FlatParameters,
    exchange: MessageExchange,
    aggregation: TwoStageAggregation,
    rank: int,
) -> RankState:
    """Lay a state of the `old` parameters out for these, which begin with zeros where they are new.

    `exchange` is that of the old stripes, which ranks give each other: all must call this together.
    """
    stripe, begun = aggregation.stripes[rank], aggregation.begin(rank, new.zeros())

    def of_stripe(vector: Float[Tensor, " old_stripe"]) -> Float[Tensor, " stripe_elements"]:
        return stripe.of(new.carry_over(exchange.gather(vector), old)).clone()

    stripe_residual, velocity = of_stripe(state.stripe_residual), of_stripe(state.velocity)
    adagrad, place = begun.adagrad, aggregation.adagrad.place
    # With a weight of many steps and squares of none, a new tensor's first step would be huge: so
    # AdaGrad begins again where a tensor is new.
    if new.named.keys() <= old.named.keys() and place is not AdaGradPlace.NOWHERE:
        squares = state.adagrad.squares
        carried = of_stripe(squares) if place in STRIPE_PLACES else new.carry_over(squares, old)
        adagrad = AdaGradState(carried, state.adagrad.weight.to(new.device))
    return RankState(new.carry_over(state.residual, old), stripe_residual, velocity, adagrad)


def resharding_plan_of(entries: State) -> ReshardingPlan:
    """Return how other ranks take over the entries of `state_entries`.

    Residuals are sums, so that no gradient is lost, and each stripe is cut again. A rank's own
    squares, of partial gradients, are averaged: an estimate, as fewer ranks' gradients are longer.
    """
    rules: dict[EntryPath, Rule] = {
        ("trainer", "residuals"): "sum",
        ("trainer", "stripe_residual"): "stripe",
        ("trainer", "velocity"): "stripe",
    }
    place, num_models = AdaGradPlace(entries["adagrad"]["place"]), 1
    if place in STRIPE_PLACES:
        rules["trainer", "squares"] = "stripe"
    elif place is AdaGradPlace.PARTIAL:
        rules["trainer", "squares"], num_models = "mean", entries["num_ranks"]

    def stripe_bounds(num_ranks: int) -> Sequence[int]:
        stripes = stripes_for(entries["residuals"], num_ranks)
        end = stripes[-1].first_element + stripes[-1].columns.num_elements
        return [*(each.first_element for each in stripes), end]

    return ReshardingPlan(num_models, rules, stripe_bounds)
