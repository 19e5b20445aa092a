"""Train by data-parallel SGD that exchanges one bit an element (paper 004).

Messages are exchanged in two stages (section 3.1). With double buffering a half-minibatch's
exchange runs while the next one's gradients are computed (section 2.2). What a rank carries between
steps is kept in checkpoints, and laid out again for other tensors and ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.distributed import ProcessGroup

from training.algorithms.one_bit import (
    STRIPE_PLACES,
    AdaGradState,
    RankState,
    Stripe,
    TwoStageAggregation,
    columns_of,
    num_message_words,
    stripes_of,
)
from training.distributed.collectives import (
    CommunicationThread,
    all_to_all,
    check_exchanges_beside,
    new_tag,
    start_receive,
    start_send,
)
from training.distributed.process_group import is_read_at_once
from training.distributed.simulated_group import SimulatedGroup
from training.settings.trainers import AdaGradPlace, OneBitConfig
from training.trainers.replica import check_plain_sgd
from training.trainers.trainer import (
    EntryPath,
    ReshardingPlan,
    Rule,
    State,
    Statistics,
    Trainer,
    norm_of,
)


class PendingUpdate:
    """PendingUpdate is the update of a step whose exchange is under way.

    The second stage begins when the first has arrived, so a thread runs `work`, both stages. On a
    GPU this thread queues them on a stream of their own, and its host waits for neither.
    """

    def __init__(
        self,
        work: Callable[[], Float[Tensor, " elements"]],
        step: int,
        group: ProcessGroup,
        device: torch.device,
    ) -> None:
        self.step = step
        self._work = work
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._thread: CommunicationThread | None = None
        if _needs_thread(group, device):
            self._thread = CommunicationThread(self._run, group, "1-bit exchange")
        else:
            self._run()

    def wait(self) -> Float[Tensor, " elements"]:
        """Return the update; raises the error that ended its exchange."""
        if self._thread is not None:
            self._thread.join()
        if self._stream is not None:
            current = torch.cuda.current_stream(self._update.device)
            current.wait_stream(self._stream)
            self._update.record_stream(current)
        return self._update

    def _run(self) -> None:
        stream = nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
        # The training thread's no_grad() holds in that thread alone.
        with torch.no_grad(), stream:
            self._update = self._work()


def _needs_thread(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether exchanges run beside computation in a thread: a real GPU has streams."""
    return isinstance(group, SimulatedGroup) or is_read_at_once(device)


class OneBit(Trainer):
    """OneBit quantizes gradients to one bit, and again their sum, normalized and smoothed.

    The optimizer must be SGD without momentum: it applies rate x update. The first
    `num_unquantized_steps`, and those of a cold start, exchange float32 (004 5.2). With
    `double_buffering` a step, of half a minibatch, starts the exchange of its gradients and applies
    the update of the step before; leaving applies the last. A rank alone quantizes nothing.
    """

    record = OneBitConfig
    config: OneBitConfig
    _state: RankState

    def set_up(self) -> None:
        """Lay out the stripes, and begin with empty residuals."""
        super().set_up()
        self.config.check_ranks(self.group.size(), self.group.size())
        check_plain_sgd(self.optimizer)
        self._pending: PendingUpdate | None = None
        self._num_bytes_before = 0
        self._lay_out()

    def groups(self) -> set[ProcessGroup]:
        """Return none: the exchange counts its bytes itself, as it may run beside this thread."""
        return set()

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return the update that waits, if any; a plain optimizer has no state."""
        if self._pending is None:
            return {}
        views = self._layout.views(self._pending.wait())
        return {f"pending update of parameter {name}": view for name, view in views.items()}

    def connect(self) -> None:
        """Send under a tag of this training's own."""
        self._exchange.tag = new_tag(self.group)

    def begin(self) -> None:
        """Lay the state out for the tensors that are trained now, if they are others.

        Ranks give each other their old stripes: all call this together.
        """
        if self._layout is self.parameters:
            return
        old, new, before, state = self._layout, self.parameters, self._exchange, self._state
        pending = self._pending and (self._pending.step, self._pending.wait())
        self._lay_out()
        self._exchange.tag = before.tag
        aggregation = self._exchange.aggregation
        stripe = aggregation.stripes[self.group.rank()]

        def of_stripe(vector: Float[Tensor, " old_stripe"]) -> Float[Tensor, " stripe_elements"]:
            return stripe.of(new.carry_over(before.gather(vector), old)).clone()

        stripe_residual, velocity = of_stripe(state.stripe_residual), of_stripe(state.velocity)
        adagrad, place = self._state.adagrad, aggregation.adagrad.place
        # With a weight of many steps and squares of none, a new tensor's first step would be huge:
        # so AdaGrad begins again where a tensor is new.
        if new.named.keys() <= old.named.keys() and place is not AdaGradPlace.NOWHERE:
            squares = state.adagrad.squares
            carried = of_stripe(squares) if place in STRIPE_PLACES else new.carry_over(squares, old)
            adagrad = AdaGradState(carried, state.adagrad.weight.to(new.device))
        residual = new.carry_over(state.residual, old)
        self._state = RankState(residual, stripe_residual, velocity, adagrad)
        self._num_bytes_before += before.num_bytes
        if pending:
            self._pending = self._arrived(pending[0], new.carry_over(pending[1], old))

    def exchange_gradients(self) -> None:
        """Replace each gradient by the update: this step's, or with double buffering the last."""
        check_plain_sgd(self.optimizer)
        before = self._arriving()
        step, gradients = self.num_steps + 1, self.parameters.gradients()
        self._fault.note(step, [gradients])
        is_late = self.num_steps >= self.config.num_unquantized_steps
        is_quantized = is_late and not self.is_cold
        # Bound now: after an error another state may be loaded before a thread has begun.
        work = partial(self._exchange.update, self._state, gradients, is_quantized=is_quantized)

        if self._is_double_buffered:
            # No other update is under way: state and messages follow the order of steps.
            self._pending = PendingUpdate(work, step, self.group, self.parameters.device)
            update = self.parameters.zeros() if before is None else before
        else:
            update = work()
            self._finite.examine(step, [update], lambda: self._fault.step)
        self.parameters.set_gradients(update)

    def conclude(self) -> None:
        """Apply the last update, at the rates that the optimizer has now."""
        check_plain_sgd(self.optimizer)
        self._finite.check()
        update = self._arriving()
        self._finite.check()
        if update is not None:
            self._apply(update)

    def set_evaluated(self) -> None:
        """Apply the update that waits, if any, to the parameters; it waits on."""
        if self._pending is not None:
            self._apply(self._pending.wait())

    def _apply(self, update: Float[Tensor, " elements"]) -> None:
        """Take the optimizer's step by an update, at the rates that the optimizer has now."""
        views = self.parameters.views(update)
        # A step of the optimizer would call its hooks, and schedulers would count it.
        for settings in self.optimizer.param_groups:
            held = {id(p) for p in settings["params"]}
            for name, p in self.parameters.named.items():
                if id(p) in held:
                    p.add_(views[name].to(p.dtype), alpha=-settings["lr"])

    def state_dict(self) -> dict[str, Any]:
        """Add both residuals, momentum, AdaGrad's squares, and the update that waits.

        Raises FloatingPointError where a gradient of this rank was not finite.
        """
        pending = None if self._pending is None else self._layout.by_name(self._pending.wait())
        self._finite.check()
        self._fault.check(self.group.rank())
        return {
            **super().state_dict(),
            "residuals": self._layout.by_name(self._state.residual),
            "stripe_residual": self._state.stripe_residual.clone(),
            "velocity": self._state.velocity.clone(),
            "squares": self._state.adagrad.squares.clone(),
            "weight": self._state.adagrad.weight.clone(),
            "num_ranks": self.group.size(),
            "pending_update": pending,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; ValueError for other settings or another number of ranks."""
        super().load_state_dict(state)
        if state.get("num_ranks", self.group.size()) != self.group.size():
            raise ValueError(
                f"the checkpoint is of {state['num_ranks']} ranks, each with its stripe, and this "
                f"group has {self.group.size()}: reshard it with "
                "training.checkpoints.training_state"
            )
        self._num_bytes_before += self._exchange.num_bytes
        self._lay_out()
        self._state.residual.copy_(self.parameters.flatten(state["residuals"]))
        self._state.stripe_residual.copy_(state["stripe_residual"])
        self._state.velocity.copy_(state["velocity"])
        self._state.adagrad.squares.copy_(state["squares"])
        self._state.adagrad.weight.copy_(state["weight"])
        self._pending = None
        if state["pending_update"] is not None:
            update = self.parameters.flatten(state["pending_update"])
            self._pending = self._arrived(self.num_steps, update)

    @property
    def _is_double_buffered(self) -> bool:
        """Trials are not: double buffering's delay makes them choose smaller sizes (5.4)."""
        return self.config.double_buffering and not self._is_trial

    def statistics(self) -> Statistics:
        """Add the norms of what waits in the residuals: of gradients, and of the rank's stripe.

        `bytes_sent` are all that left this rank: a stripe's update goes to each other rank, and
        counts so.
        """
        if self._pending is not None:
            self._pending.wait()
        return {
            "num_steps": self.num_steps,
            "bytes_sent": self._num_bytes_before + self._exchange.num_bytes,
            "residual_norm": norm_of(self._state.residual),
            "stripe_residual_norm": norm_of(self._state.stripe_residual),
        }

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Add the residuals up, so that no gradient is lost, and cut the stripes again.

        A rank's own squares, of partial gradients, are averaged: an estimate, as fewer ranks'
        gradients are longer.
        """
        entries, num_models = state["trainer"], 1
        rules: dict[EntryPath, Rule] = {
            ("trainer", "residuals"): "sum",
            ("trainer", "stripe_residual"): "stripe",
            ("trainer", "velocity"): "stripe",
        }
        place = AdaGradPlace(entries["settings"]["adagrad"]["place"])
        if place in STRIPE_PLACES:
            rules["trainer", "squares"] = "stripe"
        elif place is AdaGradPlace.PARTIAL:
            rules["trainer", "squares"], num_models = "mean", entries["num_ranks"]

        def stripe_bounds(num_ranks: int) -> Sequence[int]:
            stripes = _stripes(entries["residuals"], num_ranks)
            end = stripes[-1].first_element + stripes[-1].columns.num_elements
            return [*(each.first_element for each in stripes), end]

        return ReshardingPlan(num_models, rules, stripe_bounds)

    @classmethod
    def end_resharding(cls, state: State) -> State:
        """Close the trainer; an update that waits is applied by the new ranks' first step."""
        closed = super().end_resharding(state)
        trainer = {name: value for name, value in closed["trainer"].items() if name != "num_ranks"}
        return {**closed, "trainer": trainer}

    def _lay_out(self) -> None:
        """Divide the parameters that are trained now into stripes; begin with empty residuals."""
        self._layout = self.parameters
        is_beside = self._is_double_buffered and _needs_thread(self.group, self.parameters.device)
        if is_beside:
            check_exchanges_beside(self.group)
        stripes = _stripes(self.parameters.named, self.group.size())
        aggregation = TwoStageAggregation(stripes, self.config.momentum, self.config.adagrad)
        self._exchange = MessageExchange(aggregation, self.group, is_beside=is_beside)
        self._state = aggregation.begin(self.group.rank(), self.parameters.zeros())

    def _arrived(self, step: int, update: Float[Tensor, " elements"]) -> PendingUpdate:
        return PendingUpdate(lambda: update, step, self.group, self.parameters.device)

    def _arriving(self) -> Float[Tensor, " elements"] | None:
        """Wait for the update that is under way, if any; raises where it is not finite."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        update = pending.wait()
        self._finite.examine(pending.step, [update], lambda: self._fault.step)
        return update


class MessageExchange:
    """MessageExchange makes of all ranks' gradients one update, bitwise the same on all ranks.

    With `is_beside` it sends by tags, so that a thread of its own exchanges while other exchanges
    of the group run. A collective's place in the order of all of them would differ among ranks.
    """

    def __init__(
        self, aggregation: TwoStageAggregation, group: ProcessGroup, *, is_beside: bool
    ) -> None:
        self.aggregation = aggregation
        self.num_bytes = 0
        self.tag = 0
        self._group = group
        self._is_beside = is_beside

    def update(
        self, state: RankState, gradients: Float[Tensor, " elements"], *, is_quantized: bool
    ) -> Float[Tensor, " elements"]:
        """Return the update, and change the rank's state; raises CollectiveError.

        A rank alone quantizes nothing: its gradients need no exchange (004, Table 3, 1 GPU).
        """
        if self._group.size() == 1:
            return self.aggregation.unquantized_update(state, gradients)
        if not is_quantized:
            # The owner of a stripe keeps its momentum, so that quantized steps resume from it.
            parts = self.aggregation.take_parts(state, gradients)
            received = self._all_to_all(parts, [len(state.velocity)] * len(parts))
            return self.gather(self.aggregation.take_sum(state, received))
        # All lengths follow from the stripes, so that nothing but messages is sent.
        rank, stripes = self._group.rank(), self.aggregation.stripes
        words = [num_message_words(stripe.columns) for stripe in stripes]
        messages = self.aggregation.take_messages(state, gradients)
        received = self._all_to_all(messages, [words[rank]] * len(stripes))
        aggregate = self.aggregation.take_aggregate(rank, state, received)
        second = self._all_to_all([aggregate] * len(stripes), words)
        return self.aggregation.update(second, gradients)

    def gather(self, stripe: Float[Tensor, " stripe_elements"]) -> Float[Tensor, " elements"]:
        """Return the whole vector of which each rank holds its stripe."""
        sizes = [each.columns.num_elements for each in self.aggregation.stripes]
        return torch.cat(self._all_to_all([stripe] * len(sizes), sizes))

    def _all_to_all(
        self, parts: Sequence[Shaped[Tensor, " _"]], sizes: Sequence[int]
    ) -> list[Shaped[Tensor, " _"]]:
        own = self._group.rank()
        self.num_bytes += sum(part.nbytes for rank, part in enumerate(parts) if rank != own)
        if not self._is_beside:
            return all_to_all(parts, sizes, self._group, "1-bit messages")
        received = [parts[0].new_empty(size) for size in sizes]
        received[own].copy_(parts[own])
        others = [rank for rank in range(len(parts)) if rank != own]
        pending = [
            *(start_send(parts[to], to, self._group, self.tag) for to in others if len(parts[to])),
            *(start_receive(received[of], of, self._group, self.tag) for of in others if sizes[of]),
        ]
        for each in pending:
            each.wait()
        return received


def _stripes(named: Mapping[str, Tensor], num_ranks: int) -> tuple[Stripe, ...]:
    """Return each rank's stripe of parameters that lie one after the other."""
    return stripes_of(columns_of({name: p.shape for name, p in named.items()}), num_ranks)
