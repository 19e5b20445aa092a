"""Average models in pairs of ranks at any time, for which no rank waits (AD-PSGD; 001 2).

Two threads change a rank's model: one by steps, the other by exchanges with neighbours.
"""

import threading
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

from training.algorithms.mixing import drawn_partner, exchanged_weights, is_active, partners
from training.distributed import collectives
from training.distributed.pending_exchanges import (
    CommunicationThread,
    PendingExchange,
    check_exchanges_beside,
    new_tag,
    start_receive,
    start_send,
    start_sum,
)
from training.distributed.process_group import CollectiveError
from training.settings.trainers import AdPsgdConfig
from training.trainers.decentralized import OwnModels, own_model_plan, with_own_model
from training.trainers.parameters import FlatParameters
from training.trainers.trainer import (
    STEPS_BETWEEN_COMPARISONS,
    ReshardingPlan,
    State,
    Statistics,
)


@dataclass(slots=True)
class Staleness:
    """Staleness counts the exchanges between the read of a gradient's weights and its step."""

    num_exchanges: int = 0
    num_busy: int = 0
    num_steps: int = 0
    largest: int = 0
    total: int = 0

    def mean(self) -> float:
        """Return the mean of the steps that were counted; 0 of none."""
        return self.total / max(self.num_steps, 1)

    def note(self, staleness: int) -> None:
        """Count one step."""
        self.num_steps += 1
        self.largest = max(self.largest, staleness)
        self.total += staleness


@dataclass(slots=True)
class ModelInMotion:
    """ModelInMotion is x, a rank's column of W_k; each method is one change of it.

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
        """Apply what an optimizer made of the weights it read; return those to read next."""
        with self._lock:
            self.own_steps = self.own_steps + (stepped - self._read)
            if self.staleness == 0:
                self.weights = stepped.clone()
            else:
                # x has moved on: the step's change is applied where x is now (001 2).
                self.weights = self.weights + (stepped - self._read)
            self.counts.note(self.staleness)
            self.staleness, self._read = 0, self.weights.clone()
            return self._read

    def answer(self, received: Float[Tensor, " elements"]) -> Float[Tensor, " elements"] | None:
        """Average with an active rank's model; return what it must average with, None if busy.

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
    """Offer is an active rank's exchange under way: what it sent, and the answer to come."""

    sent: Float[Tensor, " elements"]
    send: PendingExchange
    answer: PendingExchange


class AdPsgd(OwnModels):
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
        self._motion = ModelInMotion(self._host_weights(), self.config.max_staleness)
        self._offer: Offer | None = None
        self._threads: list[CommunicationThread] = []
        rank, num_ranks = self.group.rank(), self.group.size()
        self._partners = partners(rank, num_ranks) if num_ranks > 1 else ()
        self._is_active = is_active(rank)

    def groups(self) -> set[ProcessGroup]:
        """Return none: threads send at any time, and count what they send themselves."""
        return set()

    def is_comparison_awaited(self) -> bool:
        """Look at a comparison when the next is due: until then no rank waits for a slow one."""
        return self.num_steps + 1 - self._last_comparison >= STEPS_BETWEEN_COMPARISONS

    def connect(self) -> None:
        """Continue from a checkpoint's own model."""
        self._tag = new_tag(self.group)
        if self._is_open:
            self._continue_from(self._motion.snapshot())

    def begin(self) -> None:
        """Start from the model that all ranks share."""
        self._continue_from(self._host_weights())

    def end_step(self) -> None:
        """Apply the step, look at the exchange under way, and start the next one."""
        for thread in self._threads:
            thread.check()
        if self._offer is not None and self._offer.answer.is_done():
            self._take_answer()
        self.parameters.set_weights(self._motion.step(self._host_weights()))
        if self._is_active and self._partners and self._offer is None:
            self._start_offer()

    def own_model(self) -> Float[Tensor, " elements"]:
        """Return this rank's model as it is now, with what others have averaged into it."""
        return self._motion.snapshot().to(self.parameters.device)

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
        self._motion.weights = self._host_weights()

    def abandon(self) -> None:
        """Give up the exchange under way; a passive rank is busy until its partners have finished.

        A thread that still waited in gloo would end its process by SIGABRT, when it is to exit.
        """
        self._motion.max_staleness = 0
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
            self._await_quiet()
        own = {
            "own_model": self.parameters.by_name(self.own_model()),
            "num_offers": self.num_offers,
            "exchanges": asdict(self._motion.counts),
        }
        if self._is_entered and self._is_open:
            collectives.barrier(self.group)
        return super().state_dict() | own

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; ValueError where it is of another seed."""
        super().load_state_dict(state)
        own = self.parameters.flatten(state["own_model"]).cpu()
        counts = Staleness(**state["exchanges"])
        self._motion = ModelInMotion(own, self.config.max_staleness, counts)
        self.num_offers = state["num_offers"]

    def carry_over(self, old: FlatParameters) -> None:
        """Forget the model of other tensors."""
        super().carry_over(old)
        self._motion = ModelInMotion(
            self._host_weights(), self.config.max_staleness, self._motion.counts
        )

    def replaceable_settings(self, state: Mapping[str, Any]) -> Collection[str]:
        """Name the bound of staleness."""
        del state
        return ("max_staleness",)

    def statistics(self) -> Statistics:
        """Add the exchanges that moved this rank's model, and how late its steps were.

        A step's staleness is the number of exchanges between the read of its gradient's weights and
        the step. `num_busy` counts the offers that this rank has declined to bound it.
        """
        counts = self._motion.counts
        return super().statistics() | {
            "num_exchanges": counts.num_exchanges,
            "num_busy": counts.num_busy,
            "mean_staleness": counts.mean(),
            "max_staleness": counts.largest,
        }

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Average the ranks' own models within the training; new ranks count from zero."""
        plan = own_model_plan(state)
        own = {("trainer", "exchanges"): "own", ("trainer", "num_offers"): "own"}
        return ReshardingPlan(plan.num_models, {**plan.rules, **own})  # type: ignore[dict-item]

    @classmethod
    def end_resharding(cls, state: State) -> State:
        """Begin from the mean of the models, as leaving would."""
        return super().end_resharding(with_own_model(state))

    def _continue_from(self, weights: Float[Tensor, " elements"]) -> None:
        counts = self._motion.counts
        self._motion = ModelInMotion(weights, self.config.max_staleness, counts)
        self.parameters.set_weights(weights.to(self.parameters.device))
        if not self._is_active:
            self._threads = [
                CommunicationThread(partial(self._answer, each), self.group, "answers")
                for each in self._partners
            ]

    def _answer(self, partner: int) -> None:
        """Answer an active rank until it has finished, in a thread of its own."""
        tag, motion = self._tag, self._motion
        message = self._message(motion.snapshot(), MODEL)
        while True:
            # Ranks may all be at other work for longer than the limit, such as an evaluation.
            start_receive(message, partner, self.group, tag).wait_without_limit()
            if float(message[-1]) == FINISHED:
                return
            received = message[:-1].clone()
            answer = motion.answer(received)
            reply = self._message(received if answer is None else answer, MODEL)
            if answer is None:
                reply[-1] = BUSY
            start_send(reply, partner, self.group, tag).wait()
            self._count(reply)

    def _start_finishing(self) -> list[PendingExchange]:
        """Tell the passive partners of an active rank that no offer follows."""
        if not self._is_active:
            return []
        finished = self._message(self._motion.snapshot(), FINISHED)
        return [self._start_send(finished, each) for each in self._partners]

    def _start_offer(self) -> None:
        partner = drawn_partner(
            self.config.mixing_seed, self.group.rank(), self.num_offers, self.group.size()
        )
        self.num_offers += 1
        sent = self._motion.snapshot()
        message = self._message(sent, MODEL)
        self._count(message)
        self._offer = Offer(
            sent,
            self._start_send(message, partner),
            start_receive(torch.empty_like(message), partner, self.group, self._tag),
        )

    def _start_send(
        self, message: Float[Tensor, " elements_and_one"], partner: int
    ) -> PendingExchange:
        return start_send(message, partner, self.group, self._tag)

    def _take_answer(self) -> None:
        """Wait for the answer; average with it, unless its sender is busy."""
        offer, self._offer = self._offer, None
        assert offer is not None
        answer = offer.answer.wait()
        offer.send.wait()
        if float(answer[-1]) == MODEL:
            self._motion.take_answer(offer.sent, answer[:-1])

    def _start_total(self) -> PendingExchange:
        """Sum the ranks' own steps, which exchanges do not move: the mean is the same.

        So an exchange that is half done counts on neither side, and no rank waits for its end.
        """
        return start_sum(self._motion.own_steps.clone(), self.group, "models")

    def _await_quiet(self) -> None:
        """End this rank's exchange, and wait until all ranks have: none begins before a step."""
        if self._offer is not None:
            self._take_answer()
        collectives.barrier(self.group)

    def _host_weights(self) -> Float[Tensor, " elements"]:
        return self.parameters.weights().cpu()

    def _count(self, message: Tensor) -> None:
        self._traffic.add(message.nbytes, message.nbytes)

    @staticmethod
    def _message(
        weights: Float[Tensor, " elements"], kind: float
    ) -> Float[Tensor, " elements_and_one"]:
        return torch.cat([weights, weights.new_full((1,), kind)])
