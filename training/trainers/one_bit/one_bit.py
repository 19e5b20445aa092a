"""Data-parallel SGD that exchanges one bit an element, with error feedback (paper 004)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from training.algorithms.one_bit.aggregation import TwoStageAggregation
from training.configuration.trainers import ON_AGGREGATE, AdaGrad
from training.distributed.communication_thread import check_exchanges_beside
from training.distributed.finiteness import FiniteCheck, FirstFault
from training.distributed.pending_exchanges import new_tag
from training.trainers.one_bit.double_buffer import PendingUpdate, needs_thread
from training.trainers.one_bit.message_exchange import MessageExchange
from training.trainers.one_bit.rank_state import (
    carried_over,
    resharding_plan_of,
    restored,
    state_entries,
    stripes_for,
)
from training.trainers.replica.optimizer_state import check_plain_sgd
from training.trainers.replica.parameters import FlatParameters
from training.trainers.resharding import ReshardingPlan, State, check_settings
from training.trainers.statistics import OneBitStatistics, norm_of
from training.trainers.trainer import Trainer


class OneBit(Trainer):
    """OneBit quantizes gradients to one bit, and again their sum, normalized and smoothed.

    The optimizer must be SGD without momentum: it applies rate x update. The first
    `num_unquantized_steps` exchange float32 (004 5.2). With `double_buffering` a step, of half a
    minibatch, starts the exchange of its gradients and applies the update of the step before;
    leaving applies the last. A rank alone quantizes nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        group: ProcessGroup,
        momentum: float = 0.9,
        adagrad: AdaGrad = ON_AGGREGATE,
        num_unquantized_steps: int = 0,
        double_buffering: bool = False,
    ) -> None:
        super().__init__(model, optimizer, group=group)
        check_plain_sgd(optimizer)
        if num_unquantized_steps < 0:
            raise ValueError(f"num_unquantized_steps = {num_unquantized_steps}: need 0 or more")
        self.momentum = momentum
        self.adagrad = adagrad
        self.num_unquantized_steps = num_unquantized_steps
        self.double_buffering = double_buffering
        self._pending: PendingUpdate | None = None
        self._num_bytes_before = 0
        self._lay_out()
        self._state = self._exchange.aggregation.begin(group.rank(), self.parameters.zeros())
        self.forget_faults()

    def groups(self) -> set[ProcessGroup]:
        """Return none: the exchange counts its bytes itself, as it may run beside this thread."""
        return set()

    @property
    def wire_bytes(self) -> int:
        """Return the bytes that left this process; every message goes straight to its receiver."""
        if self._pending is not None:
            self._pending.wait()
        return self._num_bytes_before + self._exchange.num_bytes

    def settings(self) -> dict[str, object]:
        """Name what must be equal on all ranks."""
        return super().settings() | self._own_settings()

    def shared_state(self) -> Mapping[str, Tensor]:
        """Return the update that waits, if any; a plain optimizer has no state."""
        if self._pending is None:
            return {}
        views = self._layout.views(self._pending.wait())
        return {f"pending update of parameter {name}": view for name, view in views.items()}

    def carry_over(self, old: FlatParameters) -> None:
        """Look for NaNs where the model now lies; `begin` lays the state out, with all ranks."""
        del old
        self.forget_faults()

    def forget_faults(self) -> None:
        """Look for NaNs from now on."""
        self._fault = FirstFault(self.parameters.device)
        self._finite = FiniteCheck(self.group, self.parameters.device)

    def connect(self) -> None:
        """Send under a tag of this training's own."""
        self._exchange.tag = new_tag(self.group)

    def begin(self) -> None:
        """Lay the state out for the tensors that are trained now, if they are others."""
        if self._layout is self.parameters:
            return
        old, before = self._layout, self._exchange
        pending = self._pending and (self._pending.step, self._pending.wait())
        self._lay_out()
        self._exchange.tag = before.tag
        aggregation, rank = self._exchange.aggregation, self.group.rank()
        self._state = carried_over(self._state, old, self.parameters, before, aggregation, rank)
        self._num_bytes_before += before.num_bytes
        if pending:
            self._pending = self._arrived(pending[0], self.parameters.carry_over(pending[1], old))

    def exchange_gradients(self) -> None:
        """Replace each gradient by the update: this step's, or with double buffering the last."""
        check_plain_sgd(self.optimizer)
        self._finite.check()
        before = self._arriving()
        step, gradients = self.num_steps + 1, self.parameters.gradients()
        self._fault.note(step, [gradients])
        is_quantized = self.num_steps >= self.num_unquantized_steps
        # Bound now: after an error another state may be loaded before a thread has begun.
        work = partial(self._exchange.update, self._state, gradients, is_quantized=is_quantized)

        if self.double_buffering:
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
        if update is None:
            return
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
            **self._own_settings(),
            **state_entries(self._state, self._layout),
            "num_ranks": self.group.size(),
            "pending_update": pending,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; ValueError for other settings or another number of ranks."""
        super().load_state_dict(state)
        check_settings(state, self._own_settings())
        if state.get("num_ranks", self.group.size()) != self.group.size():
            raise ValueError(
                f"the checkpoint is of {state['num_ranks']} ranks, each with its stripe, and this "
                f"group has {self.group.size()}: reshard it with training.checkpoints.resharding"
            )
        self._num_bytes_before += self._exchange.num_bytes
        self._lay_out()
        begun = self._exchange.aggregation.begin(self.group.rank(), self.parameters.zeros())
        self._state = restored(state, self.parameters, begun)
        self._pending = None
        if state["pending_update"] is not None:
            update = self.parameters.flatten(state["pending_update"])
            self._pending = self._arrived(self.num_steps, update)

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Train without double buffering, whose delay makes trials choose smaller sizes (5.4)."""
        before, self.double_buffering = self.double_buffering, False
        try:
            with super().trial():
                yield
        finally:
            self.double_buffering = before

    def statistics(self) -> OneBitStatistics:
        """Return the steps, what was sent, and the norms of what waits in the residuals."""
        return OneBitStatistics(
            num_steps=self.num_steps,
            bytes_sent=self.wire_bytes,
            residual_norm=norm_of(self._state.residual),
            stripe_residual_norm=norm_of(self._state.stripe_residual),
        )

    @classmethod
    def resharding_plan(cls, state: State) -> ReshardingPlan:
        """Add the residuals up, and cut the stripes again."""
        return resharding_plan_of(state["trainer"])

    @classmethod
    def end_resharding(cls, state: State) -> State:
        """Close the trainer; an update that waits is applied by the new ranks' first step."""
        closed = super().end_resharding(state)
        trainer = {name: value for name, value in closed["trainer"].items() if name != "num_ranks"}
        return {**closed, "trainer": trainer}

    def _own_settings(self) -> dict[str, Any]:
        return {
            "momentum": self.momentum,
            "adagrad": {**asdict(self.adagrad), "place": self.adagrad.place.value},
            "num_unquantized_steps": self.num_unquantized_steps,
            "double_buffering": self.double_buffering,
        }

    def _lay_out(self) -> None:
        """Divide the parameters that are trained now into stripes."""
        self._layout = self.parameters
        stripes = stripes_for(self.parameters.named, self.group.size())
        is_beside = self.double_buffering and needs_thread(self.group, self.parameters.device)
        if is_beside:
            check_exchanges_beside(self.group)
        self._exchange = MessageExchange(
            TwoStageAggregation(stripes, self.momentum, self.adagrad),
            self.group,
            is_beside=is_beside,
        )

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
