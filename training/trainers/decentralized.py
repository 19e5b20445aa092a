"""Train a model of each rank's own, and average models beside the gradients (paper 001).

D-PSGD and RAND-PSGD: each rank averages with its two neighbours on a ring (sections 2, 3).
D1D-PSGD: an all-reduce of the models runs beside the gradient at the last mean (section 4).
AD-PSGD: pairs of ranks average at any time, and no rank waits (section 2).
The mean of all models is evaluated.
"""

import threading
from abc import abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from training.algorithms.mixing import (
    Ring,
    drawn_partner,
    exchanged_weights,
    fixed_ring,
    is_active,
    mixed_weights,
    partners,
    permuted_ring,
)
from training.distributed import collectives
from training.distributed.collectives import (
    CommunicationThread,
    PendingExchange,
    check_exchanges_beside,
    new_tag,
    start_receive,
    start_send,
    start_sum,
)
from training.distributed.process_group import CollectiveError, is_read_at_once
from training.settings.trainers import AdPsgdConfig, D1dPsgdConfig, DPsgdConfig, RandPsgdConfig
from training.trainers.parameters import FlatParameters
from training.trainers.trainer import (
    STEPS_BETWEEN_COMPARISONS,
    EntryPath,
    ReshardingPlan,
    Rule,
    State,
    Statistics,
    Trainer,
)


class PendingMean:
    """PendingMean is a pending mean of all ranks' models, while this rank trains on."""

    def __init__(self, total: PendingExchange, parameters: FlatParameters, num_models: int) -> None:
        self._total, self._parameters, self._num_models = total, parameters, num_models

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

    def exchange_gradients(self) -> None:
        """Check this rank's gradients, which no other rank sees; make missing ones zeros."""
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
        """Start what `mean_model` waits for, from this rank's present model.

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
        self._finite.examine(self.num_steps, [mean], lambda: self._fault.step)
        self._finite.check()
        self.parameters.set_weights(mean)

    def set_evaluated(self) -> None:
        """Set the parameters to the mean of all ranks' models."""
        self.parameters.set_weights(self._mean())

    def _start_total(self) -> PendingExchange:
        return start_sum(self.own_model(), self.group, "models")

    def _mean(self) -> Float[Tensor, " elements"]:
        mean = self._start_total().wait() / self.group.size()
        return mean.to(self.parameters.device)

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
        """Give the round up; neighbours may still receive what was sent."""
        for exchange in [*self._sends, *self._receives.values()]:
            exchange.abandon()


class RingMixing(OwnModels):
    """RingMixing computes W_{k+1} = W_k T - alpha_k g(W_k), eq. (2) of paper 001.

    A rank sends W_k to its neighbours while it computes the gradient at W_k. Its optimizer then
    applies the gradient to the mixture.
    """

    def set_up(self) -> None:
        """Begin without a round."""
        super().set_up()
        self._pending: PendingMixture | None = None

    @abstractmethod
    def ring(self, round_index: int) -> Ring:
        """Return the ring of a mixing round."""

    def connect(self) -> None:
        """Restart the round that a checkpoint interrupted: its input is the model."""
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
        self._start_round()

    def conclude(self) -> None:
        """Complete the pending round, and leave the mean of the models."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None
        super().conclude()

    def abandon(self) -> None:
        """Give up the pending round."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None

    def carry_over(self, old: FlatParameters) -> None:
        """Drop the pending round: it is of other tensors."""
        super().carry_over(old)
        self._pending = None

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Average the models within the training, where they differ; elsewhere they are equal."""
        trainer = state["trainer"]
        names = trainer["trained"] if trainer["is_open"] else []
        return ReshardingPlan(trainer["num_models"], {("model", name): "mean" for name in names})

    def _start_round(self) -> None:
        ring = self.ring(self.num_steps)
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


class OwnModelBeside(OwnModels):
    """OwnModelBeside has this rank's own model beside the parameters, as `own_model` in a state."""

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Average the ranks' own models within the training."""
        trainer = state["trainer"]
        rules: dict[EntryPath, Rule] = (
            {("trainer", "own_model"): "mean"} if trainer["is_open"] else {}
        )
        return ReshardingPlan(trainer["num_models"], rules)

    @classmethod
    def end_resharding(cls, state: State) -> State:
        """Begin from the mean of the models, as leaving would."""
        trainer, ended = state["trainer"], super().end_resharding(state)
        if not trainer["is_open"]:
            return ended
        return {**ended, "model": {**state["model"], **trainer["own_model"]}}


class D1dPsgd(OwnModelBeside):
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
        """Restart the sum that a checkpoint interrupted."""
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
        """Leave the mean of the models, whose sum is pending."""
        super().conclude()
        self._own, self._pending = self.parameters.weights(), None

    def carry_over(self, old: FlatParameters) -> None:
        """Drop the pending sum: it is of other tensors."""
        super().carry_over(old)
        self._own, self._pending = self.parameters.weights(), None

    def state_dict(self) -> dict[str, Any]:
        """Add this rank's own model, whose sum is pending."""
        return super().state_dict() | {"own_model": self.parameters.by_name(self._own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`."""
        super().load_state_dict(state)
        self._own = self.parameters.flatten(state["own_model"])

    def _start_total(self) -> PendingExchange:
        # W_k T_u, whose sum is pending and may be asked for more than once.
        return super()._start_total() if self._pending is None else self._pending

    def _start_sum(self) -> None:
        self._pending = start_sum(self.own_model(), self.group, "models")


@dataclass(slots=True)
class Staleness:
    """Staleness counts the exchanges between the read of a gradient's weights and its step."""

    num_exchanges: int = 0
    num_busy: int = 0
    num_steps: int = 0
    largest: int = 0
    total: int = 0


@dataclass(slots=True)
class ConcurrentModel:
    """ConcurrentModel is x, a rank's column of W_k, which two threads change; methods are atomic.

    A gradient is computed at the weights that `step` returned. `staleness` of the next gradient is
    the number of exchanges since then. `own_steps` is the first x and the rank's steps, without
    what exchanges moved.
    """

    weights: Float[Tensor, " elements"]
    max_staleness: int
    counts: Staleness = field(default_factory=Staleness)
    staleness: int = 0
    own_steps: Float[Tensor, " elements"] = field(init=False)
    _read: Float[Tensor, " elements"] = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        # The first gradient is computed here, and an exchange may come before its step.
        self._read = self.weights.clone()
        self.own_steps = self.weights.clone()

    def snapshot(self) -> Float[Tensor, " elements"]:
        """Copy x, to be sent."""
        with self._lock:
            return self.weights.clone()

    def step(self, stepped: Float[Tensor, " elements"]) -> Float[Tensor, " elements"]:
        """Apply an optimizer's step to the weights it read; return the weights to read next."""
        with self._lock:
            self.own_steps = self.own_steps + (stepped - self._read)
            if self.staleness == 0:
                self.weights = stepped.clone()
            else:
                # x has moved on: the step's change is applied where x is now (001 2).
                self.weights = self.weights + (stepped - self._read)
            self.counts.num_steps += 1
            self.counts.largest = max(self.counts.largest, self.staleness)
            self.counts.total += self.staleness
            self.staleness, self._read = 0, self.weights.clone()
            return self._read

    def answer(self, received: Float[Tensor, " elements"]) -> Float[Tensor, " elements"] | None:
        """Average with an active rank's model; return this rank's in answer, None if it is busy.

        A rank is busy once `max_staleness` exchanges have moved x since its last step.
        """
        with self._lock:
            if self.staleness >= self.max_staleness:
                self.counts.num_busy += 1
                return None
            sent = self.weights.clone()
            self._move(sent, received)
            return sent

    def take_answer(
        self, sent: Float[Tensor, " elements"], received: Float[Tensor, " elements"]
    ) -> None:
        """Average with a passive rank's model, in return for what was sent."""
        with self._lock:
            self._move(sent, received)

    def _move(self, sent: Float[Tensor, " elements"], received: Float[Tensor, " elements"]) -> None:
        self.weights = exchanged_weights(self.weights, sent, received)
        self.staleness += 1
        self.counts.num_exchanges += 1


MODEL, BUSY, FINISHED = 0.0, 1.0, 2.0
"""A message is a model and one of these."""


@dataclass(frozen=True, slots=True)
class Offer:
    """Offer is an active rank's pending exchange: what it sent, and the answer to come."""

    sent: Float[Tensor, " elements"]
    send: PendingExchange
    answer: PendingExchange


class AdPsgd(OwnModelBeside):
    """AdPsgd averages with one neighbour at a time, in a thread beside the gradients.

    Even ranks are active: each has one exchange under way, with a neighbour drawn from
    `mixing_seed`, and looks at it once a step. Odd ranks are passive: they answer at once, and wait
    for no rank, so that ranks cannot wait for each other in a circle. A passive rank whose model
    was moved `max_staleness` times since its last step answers that it is busy, and nothing is
    averaged.
    Results depend on timing; in virtual time they repeat. A rank that dies ends its neighbours'
    exchanges, and a leaving rank waits for no longer than its group's time limit. Models lie in the
    host's memory, also those of GPUs.

    `mean_model` stops no exchange. It is the mean of the model that ranks began with or resumed
    from, and all steps that each rank had applied when it asked: what averaging would end at.
    """

    record = AdPsgdConfig
    keywords = MappingProxyType({"seed": "mixing_seed"})
    config: AdPsgdConfig

    def set_up(self) -> None:
        """Begin with the model as it is, and without an exchange."""
        super().set_up()
        check_exchanges_beside(self.group)
        self.num_offers = 0
        self._hold(self._host_weights(), Staleness())
        self._offer: Offer | None = None
        self._threads: list[CommunicationThread] = []
        rank, num_ranks = self.group.rank(), self.group.size()
        self._partners = partners(rank, num_ranks)
        self._is_active = is_active(rank)

    def groups(self) -> set[ProcessGroup]:
        """Return none: threads send at any time, and count what they send themselves."""
        return set()

    def is_comparison_awaited(self) -> bool:
        """Check a comparison when the next one is due: until then no rank waits for a slow one."""
        return self.num_steps + 1 - self._last_comparison >= STEPS_BETWEEN_COMPARISONS

    def connect(self) -> None:
        """Continue from a checkpoint's own model."""
        self._tag = new_tag(self.group)
        if self._is_open:
            self._continue_from(self._concurrent.snapshot())

    def begin(self) -> None:
        """Start from the model that all ranks share."""
        self._continue_from(self._host_weights())

    def end_step(self) -> None:
        """Apply the step, poll the pending exchange, and start the next one."""
        for thread in self._threads:
            thread.check()
        if self._offer is not None and self._offer.answer.is_done():
            self._take_answer()
        self.parameters.set_weights(self._concurrent.step(self._host_weights()))
        if self._is_active and self._partners and self._offer is None:
            self._start_offer()

    def own_model(self) -> Float[Tensor, " elements"]:
        """Return this rank's model as it is now, with what others have averaged into it."""
        return self._concurrent.snapshot().to(self.parameters.device)

    def conclude(self) -> None:
        """End all exchanges, and leave the mean of the models."""
        if self._offer is not None:
            self._take_answer()
        for send in self._start_finishing():
            send.wait()
        # An answering thread has no time limit: once all are here, it ends as its rank's do.
        collectives.barrier(self.group)
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        super().conclude()
        self._concurrent.weights = self._host_weights()

    def abandon(self) -> None:
        """Give up the pending exchange; a passive rank answers "busy" until its partners finish.

        A thread that still waited in gloo would end its process by SIGABRT, when it is to exit.
        """
        self._concurrent.max_staleness = 0
        self._threads = []
        with suppress(CollectiveError):  # of a partner that is dead
            for send in self._start_finishing():
                send.abandon()
        if self._offer is not None:
            self._offer.send.abandon()
            self._offer.answer.abandon()
            self._offer = None

    def state_dict(self) -> dict[str, Any]:
        """Add this rank's model, the counts of its exchanges, and the settings.

        All ranks call this together: the models are those of one moment, at which no exchange is
        half done, so that their mean is the one that leaving would give.
        """
        if self._is_entered and self._is_open:
            # End this rank's exchange, and wait until all ranks have: none begins before a step.
            if self._offer is not None:
                self._take_answer()
            collectives.barrier(self.group)
        own = {
            "own_model": self.parameters.by_name(self.own_model()),
            "num_offers": self.num_offers,
            "exchanges": asdict(self._concurrent.counts),
        }
        if self._is_entered and self._is_open:
            collectives.barrier(self.group)
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; ValueError where it is of another seed."""
        super().load_state_dict(state)
        own = self.parameters.flatten(state["own_model"]).cpu()
        self._hold(own, Staleness(**state["exchanges"]))
        self.num_offers = state["num_offers"]

    def carry_over(self, old: FlatParameters) -> None:
        """Start from the model of the tensors that are trained now."""
        super().carry_over(old)
        self._hold(self._host_weights(), self._concurrent.counts)

    def replaceable_settings(self, state: Mapping[str, Any]) -> Collection[str]:
        """Allow another bound of staleness."""
        del state
        return ("max_staleness",)

    def statistics(self) -> Statistics:
        """Add the exchanges that moved this rank's model, and how late its steps were.

        A step's staleness is the number of exchanges between the read of its gradient's weights and
        the step. `num_busy` counts the offers that this rank has declined to bound it.
        """
        counts = self._concurrent.counts
        return super().statistics() | {
            "num_exchanges": counts.num_exchanges,
            "num_busy": counts.num_busy,
            "mean_staleness": counts.total / max(counts.num_steps, 1),
            "max_staleness": counts.largest,
        }

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Average the ranks' own models within the training; new ranks count from zero."""
        plan = super().resharding_plan(state)
        own = {("trainer", "exchanges"): "own", ("trainer", "num_offers"): "own"}
        return ReshardingPlan(plan.num_models, {**plan.rules, **own})  # type: ignore[dict-item]

    def _hold(self, weights: Float[Tensor, " elements"], counts: Staleness) -> None:
        self._concurrent = ConcurrentModel(weights, self.config.max_staleness, counts)

    def _continue_from(self, weights: Float[Tensor, " elements"]) -> None:
        self._hold(weights, self._concurrent.counts)
        self.parameters.set_weights(weights.to(self.parameters.device))
        if not self._is_active:
            self._threads = [
                CommunicationThread(partial(self._answer, each), self.group, "answers")
                for each in self._partners
            ]

    def _answer(self, partner: int) -> None:
        """Answer an active rank until it has finished, in a thread of its own."""
        tag, own = self._tag, self._concurrent
        message = self._message(own.snapshot(), MODEL)
        while True:
            # Ranks may all be at other work for longer than the limit, such as an evaluation.
            start_receive(message, partner, self.group, tag).wait_without_limit()
            if float(message[-1]) == FINISHED:
                return
            received = message[:-1].clone()
            answer = own.answer(received)
            reply = self._message(received if answer is None else answer, MODEL)
            if answer is None:
                reply[-1] = BUSY
            start_send(reply, partner, self.group, tag).wait()
            self._traffic.add(reply.nbytes)

    def _start_finishing(self) -> list[PendingExchange]:
        """Tell the passive partners of an active rank that no more offers follow."""
        if not self._is_active:
            return []
        finished = self._message(self._concurrent.snapshot(), FINISHED)
        return [start_send(finished, each, self.group, self._tag) for each in self._partners]

    def _start_offer(self) -> None:
        partner = drawn_partner(
            self.config.mixing_seed, self.group.rank(), self.num_offers, self.group.size()
        )
        self.num_offers += 1
        sent = self._concurrent.snapshot()
        message = self._message(sent, MODEL)
        self._traffic.add(message.nbytes)
        self._offer = Offer(
            sent,
            start_send(message, partner, self.group, self._tag),
            start_receive(torch.empty_like(message), partner, self.group, self._tag),
        )

    def _take_answer(self) -> None:
        """Wait for the answer; average with it, unless its sender is busy."""
        offer, self._offer = self._offer, None
        assert offer is not None
        answer = offer.answer.wait()
        offer.send.wait()
        if float(answer[-1]) == MODEL:
            self._concurrent.take_answer(offer.sent, answer[:-1])

    def _start_total(self) -> PendingExchange:
        """Sum the ranks' own steps, which exchanges do not move: the mean is the same.

        So an exchange that is half done counts on neither side, and no rank waits for its end.
        """
        return start_sum(self._concurrent.own_steps.clone(), self.group, "models")

    def _host_weights(self) -> Float[Tensor, " elements"]:
        return self.parameters.weights().cpu()

    @staticmethod
    def _message(
        weights: Float[Tensor, " elements"], kind: float
    ) -> Float[Tensor, " elements_and_one"]:
        return torch.cat([weights, weights.new_full((1,), kind)])
