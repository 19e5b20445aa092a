"""Train a model of each rank's own, and average models beside the gradients (paper 001).

D-PSGD and RAND-PSGD: each rank averages with its two neighbours on a ring (sections 2, 3).
D1D-PSGD: an all-reduce of the models runs beside the gradient at the last mean (section 4).
The mean of all models is evaluated. AD-PSGD is in `ad_psgd`.
"""

from abc import abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from training.algorithms.mixing import Ring, fixed_ring, mixed_weights, permuted_ring
from training.distributed import collectives
from training.distributed.checks import FiniteCheck, FirstFault
from training.distributed.pending_exchanges import (
    PendingExchange,
    new_tag,
    start_receive,
    start_send,
    start_sum,
)
from training.distributed.process_group import is_read_at_once
from training.settings.trainers import D1dPsgdConfig, DPsgdConfig, RandPsgdConfig
from training.trainers.parameters import FlatParameters
from training.trainers.trainer import (
    STEPS_BETWEEN_COMPARISONS,
    ReshardingPlan,
    State,
    Trainer,
)


class PendingMean:
    """PendingMean is a mean of all ranks' models under way; the rank trains on meanwhile."""

    def __init__(self, total: PendingExchange, parameters: FlatParameters, num_models: int) -> None:
        self._total, self._parameters, self._num_models = total, parameters, num_models

    def is_done(self) -> bool:
        """Return whether `wait` returns at once."""
        return self._total.is_done()

    def wait(self) -> dict[str, Tensor]:
        """Wait until all ranks have started theirs; return the mean by parameter."""
        mean = self._total.wait() / self._num_models
        return self._parameters.by_name(mean.to(self._parameters.device))


class OwnModels(Trainer):
    """OwnModels trains L different models, and leaves their mean, the model to evaluate (001 2).

    Each rank's optimizer applies the rank's own gradient, and ranks average models. So a frame
    counts 1 / L of what it counts where gradients are summed: a rate L times as high gives the mean
    of the models the same steps. A gradient that is not finite raises FloatingPointError on its
    rank, on a GPU up to 32 steps later; the other ranks' next exchange with it fails.
    """

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """Return nothing: parameters differ on all ranks, from the first step on."""
        return {}

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return nothing: each optimizer's state follows from its rank's own gradients."""
        return {}

    def forget_faults(self) -> None:
        """Look for NaNs from now on."""
        self._fault = FirstFault(self.parameters.device)

    def exchange_gradients(self) -> None:
        """Look at this rank's gradients, which no other rank sees; make the missing ones."""
        self._fault.note(self.num_steps + 1, self.parameters.present_gradients())
        is_due = self.num_steps % STEPS_BETWEEN_COMPARISONS == 0
        # In a trial averages take a NaN to all ranks, which find it together in their mean.
        if not self._is_trial and (is_due or is_read_at_once(self.parameters.device)):
            self._fault.check(self.group.rank())
        self.parameters.fill_missing_gradients()

    def own_model(self) -> Float[Tensor, " elements"]:
        """Return this rank's column of W_k, in a vector of its own."""
        return self.parameters.weights()

    def mean_model(self) -> dict[str, Tensor]:
        """Return the mean of all ranks' models, which is the one to evaluate, by parameter.

        All ranks call this together, between two steps. The training is the same without it.
        """
        return self.start_mean_model().wait()

    @torch.no_grad()
    def start_mean_model(self) -> PendingMean:
        """Start what `mean_model` waits for, from this rank's model of now.

        All ranks call this after the same step, each when it is there, and train on.
        """
        with self._traffic.counting(self.groups()):
            total = self._start_total()
        return PendingMean(total, self.parameters, self.group.size())

    def conclude(self) -> None:
        """Leave the mean of the models, the same on all ranks.

        Raises FloatingPointError on all ranks where the gradient of one was not finite.
        """
        mean = self._mean()
        finite = FiniteCheck(self.group, self.parameters.device)
        finite.examine(self.num_steps, [mean], lambda: self._fault.step)
        finite.check()
        self.parameters.set_weights(mean)

    def _start_total(self) -> PendingExchange:
        return start_sum(self.own_model(), self.group, "models")

    def _mean(self) -> Float[Tensor, " elements"]:
        mean = self.own_model()
        collectives.all_reduce_mean(mean, self.group)
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Add the number of models, and the names of what each rank has of its own."""
        self._fault.check(self.group.rank())
        own = {"num_models": self.group.size(), "trained": list(self.parameters.named)}
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; ValueError within the training of another number of models."""
        super().load_state_dict(state)
        if self._is_open and state["num_models"] != self.group.size():
            raise ValueError(
                f"the checkpoint is of {state['num_models']} models, this group has "
                f"{self.group.size()} ranks: reshard it with training.checkpoints.training_state"
            )


class PendingMixture:
    """PendingMixture is a mixing round under way: only a rank's neighbours wait for it."""

    def __init__(
        self, own: Float[Tensor, " elements"], ring: Ring, group: ProcessGroup, tag: int
    ) -> None:
        self._own, self._rank = own, group.rank()
        neighbours = ring.neighbours(self._rank)
        self._sends = [start_send(own, other, group, tag) for other in neighbours]
        self._receives: dict[int, PendingExchange] = {
            other: start_receive(own.new_empty(own.shape), other, group, tag)
            for other in neighbours
        }

    def wait(self) -> Float[Tensor, " elements"]:
        """Return this rank's column of W_k T."""
        models = {other: receive.wait() for other, receive in self._receives.items()}
        for send in self._sends:
            send.wait()
        return mixed_weights({**models, self._rank: self._own})

    def abandon(self) -> None:
        """Give the round up; neighbours may still take what was sent."""
        for exchange in [*self._sends, *self._receives.values()]:
            exchange.abandon()


class RingMixing(OwnModels):
    """RingMixing computes W_{k+1} = W_k T - alpha_k g(W_k), eq. (2) of paper 001.

    A rank sends W_k to its neighbours while it computes the gradient at W_k. Its optimizer then
    applies the gradient to the mixture.
    """

    def set_up(self) -> None:
        """Count the rounds."""
        super().set_up()
        self.num_rounds = 0
        self._pending: PendingMixture | None = None

    @abstractmethod
    def ring(self, round_index: int) -> Ring:
        """Return the ring of a mixing round."""

    def settings(self) -> dict[str, object]:
        """Name what must be equal on all ranks."""
        return super().settings() | {"num_rounds": self.num_rounds}

    def connect(self) -> None:
        """Start the round again that a checkpoint has interrupted: its input is the model."""
        self._tag = new_tag(self.group)
        if self._is_open:
            self._start_round()

    def begin(self) -> None:
        """Start a round from the model that all ranks share."""
        self._start_round()

    def exchange_gradients(self) -> None:
        """Replace the model by the mixture; each rank keeps its own gradient."""
        super().exchange_gradients()
        assert self._pending is not None
        # Eq. (2): the gradient was computed at W_k, and is applied to W_k T.
        self.parameters.set_weights(self._pending.wait())
        self._pending = None

    def end_step(self) -> None:
        """Start the next round, which runs beside the next gradient."""
        self.num_rounds += 1
        self._start_round()

    def conclude(self) -> None:
        """End the round under way, and leave the mean of the models."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        super().conclude()

    def abandon(self) -> None:
        """Give up the round under way."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None

    def carry_over(self, old: FlatParameters) -> None:
        """Forget a round of other tensors."""
        super().carry_over(old)
        self._pending = None

    def state_dict(self) -> dict[str, Any]:
        """Add the number of rounds; the round under way begins from the model itself."""
        return super().state_dict() | {"num_rounds": self.num_rounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        super().load_state_dict(state)
        self.num_rounds = state["num_rounds"]

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Average the models within the training, where they differ; elsewhere they are equal."""
        trainer = state["trainer"]
        names = trainer["trained"] if trainer["is_open"] else []
        return ReshardingPlan(trainer["num_models"], {("model", name): "mean" for name in names})

    def _start_round(self) -> None:
        ring = self.ring(self.num_rounds)
        self._pending = PendingMixture(self.own_model(), ring, self.group, self._tag)


class DPsgd(RingMixing):
    """DPsgd mixes on the ring of the ranks' own order: T_0 of eq. (3).

    Its rho is 1/3 + 2/3 cos(2 pi / L), eq. (6), so that 64 ranks are slow to agree.
    """

    record = DPsgdConfig

    def ring(self, round_index: int) -> Ring:
        """Return the ring of all rounds."""
        del round_index
        return fixed_ring(self.group.size())


class RandPsgd(RingMixing):
    """RandPsgd mixes on a ring of a random permutation, another one in each round: eq. (8).

    All ranks draw the same from `mixing_seed` and the round's number, and no rank sends it. A rank
    waits for its two neighbours of the round alone, for models that they had a step ago: no rank
    ends later than with D1D-PSGD. A stall that is not repeated delays three times as many ranks
    each round, at most, and stalls of distant ranks overlap. A rank that is always slow slows all,
    to its own pace, some log_3 L rounds later. Paper 001's Table 1 says "straggler avoidance: yes".
    """

    record = RandPsgdConfig
    keywords = MappingProxyType({"seed": "mixing_seed"})
    config: RandPsgdConfig

    def ring(self, round_index: int) -> Ring:
        """Return the round's ring, P^T T_0 P."""
        return permuted_ring(self.config.mixing_seed, round_index, self.group.size())


class D1dPsgd(OwnModels):
    """D1dPsgd computes W_{k+1} = W_k T_u - alpha_k g(W_{k-1} T_u): eq. (13), delayed by one.

    The parameters hold W_{k-1} T_u, the same on all ranks, while the all-reduce of W_k runs. So
    the mean of the models is SGD on all gradients, each one step late. Eq. (14) as printed takes
    the gradient at W_{k-1}, which is so for affine gradients alone.
    """

    record = D1dPsgdConfig

    def set_up(self) -> None:
        """Begin with the model as it is, its own mean."""
        super().set_up()
        self._own = self.parameters.weights()
        self._mean_before = self._own
        self._pending: PendingExchange | None = None

    def shared_tensors(self) -> Mapping[str, Tensor]:
        """Return the parameters: between steps they hold the last mean, equal on all ranks."""
        return {f"parameter {name}": tensor for name, tensor in self.parameters.named.items()}

    def connect(self) -> None:
        """Start the sum again that a checkpoint has interrupted."""
        if self._is_open:
            self._start_sum()

    def begin(self) -> None:
        """Start from the shared model, W_0 and its mean in one."""
        self._own = self.parameters.weights()
        self._start_sum()

    def exchange_gradients(self) -> None:
        """Replace the model by the mean of all; each rank keeps its own gradient."""
        super().exchange_gradients()
        self._mean_before = self._mean()
        self._pending = None
        self.parameters.set_weights(self._mean_before)

    def end_step(self) -> None:
        """Start the sum of the new models; the next gradient is computed at the last mean."""
        self._own = self.parameters.weights()
        self._start_sum()
        self.parameters.set_weights(self._mean_before)

    def own_model(self) -> Float[Tensor, " elements"]:
        """Return this rank's column of W_k, not the mean that the parameters hold."""
        return self._own.clone()

    def conclude(self) -> None:
        """Leave the mean of the models, of which the sum is under way."""
        super().conclude()
        self._own, self._pending = self.parameters.weights(), None

    def carry_over(self, old: FlatParameters) -> None:
        """Forget a sum of other tensors."""
        super().carry_over(old)
        self._own, self._pending = self.parameters.weights(), None

    def state_dict(self) -> dict[str, Any]:
        """Add this rank's own model, of which the sum is under way."""
        return super().state_dict() | {"own_model": self.parameters.by_name(self._own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        super().load_state_dict(state)
        self._own = self.parameters.flatten(state["own_model"])

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Average the ranks' own models within the training."""
        return own_model_plan(state)

    @classmethod
    def end_resharding(cls, state: State) -> State:
        """Begin from the mean of the models, as leaving would."""
        return super().end_resharding(with_own_model(state))

    def _start_total(self) -> PendingExchange:
        return super()._start_total() if self._pending is None else self._pending

    def _start_sum(self) -> None:
        self._pending = start_sum(self.own_model(), self.group, "models")

    def _mean(self) -> Float[Tensor, " elements"]:
        """Return W_k T_u, of which the sum is under way."""
        if self._pending is None:
            return super()._mean()
        # A pending sum may be asked for more than once.
        return self._pending.wait() / self.group.size()


def own_model_plan(state: State) -> ReshardingPlan:
    """Return the plan of a trainer whose state has this rank's own model beside the parameters."""
    trainer = state["trainer"]
    if not trainer["is_open"]:
        return ReshardingPlan()
    return ReshardingPlan(trainer["num_models"], {("trainer", "own_model"): "mean"})


def with_own_model(state: State) -> State:
    """Return the state with its own model in the parameters' place, where it is within training."""
    trainer = state["trainer"]
    if not trainer["is_open"]:
        return state
    return {**state, "model": {**state["model"], **trainer["own_model"]}}
