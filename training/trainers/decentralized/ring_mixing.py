"""D-PSGD and RAND-PSGD: each rank averages with its two neighbours on a ring (paper 001 2, 3)."""

from abc import abstractmethod
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from training.algorithms.decentralized.mixing import mixed_weights
from training.algorithms.decentralized.topology import Ring, fixed_ring, permuted_ring
from training.distributed.pending_exchanges import (
    PendingExchange,
    new_tag,
    start_receive,
    start_send,
)
from training.trainers.decentralized.own_models import OwnModels
from training.trainers.replica.parameters import FlatParameters
from training.trainers.resharding import ReshardingPlan, State, check_settings


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

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, group: ProcessGroup) -> None:
        super().__init__(model, optimizer, group=group)
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

    def ring(self, round_index: int) -> Ring:
        """Return the ring of all rounds."""
        del round_index
        return fixed_ring(self.group.size())


class RandPsgd(RingMixing):
    """RandPsgd mixes on a ring of a random permutation, another one in each round: eq. (8).

    All ranks draw the same from `seed` and the round's number, and no rank sends it. A rank waits
    for its two neighbours of the round alone, for models that they had a step ago: no rank ends
    later than with D1D-PSGD. A stall that is not repeated delays three times as many ranks each
    round, at most, and stalls of distant ranks overlap. A rank that is always slow slows all, to
    its own pace, some log_3 L rounds later. Paper 001's Table 1 says "straggler avoidance: yes".
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, *, group: ProcessGroup, seed: int
    ) -> None:
        super().__init__(model, optimizer, group=group)
        self.seed = seed

    def settings(self) -> dict[str, object]:
        """Name what must be equal on all ranks."""
        return super().settings() | {"seed": self.seed}

    def ring(self, round_index: int) -> Ring:
        """Return the round's ring, P^T T_0 P."""
        return permuted_ring(self.seed, round_index, self.group.size())

    def state_dict(self) -> dict[str, Any]:
        """Add the seed."""
        return super().state_dict() | {"seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict()`; ValueError where it is of another seed."""
        super().load_state_dict(state)
        check_settings(state, {"seed": self.seed})
