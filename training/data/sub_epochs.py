"""Learning rates and what a sub-epoch sub-epochs (paper 003 II-B, V-D; 000 3.2)."""

import math
from dataclasses import dataclass

from pipeline.splicing import STACK


@dataclass(frozen=True, slots=True)
class ExponentialDecay:
    """From `initial` at the first of `num_epochs` to `final` at the last, by a constant factor."""

    initial: float
    final: float
    num_epochs: int

    def __post_init__(self) -> None:
        if not 0 < self.final <= self.initial:
            raise ValueError(
                f"learning rates {self.initial} -> {self.final}: need 0 < final <= initial"
            )
        if self.num_epochs < 1:
            raise ValueError(f"num_epochs = {self.num_epochs}: need at least 1")

    def learning_rate(self, epoch: int) -> float:
        """The rate of `epoch`, counted from 0."""
        progress = epoch / max(self.num_epochs - 1, 1)
        return float(self.initial * (self.final / self.initial) ** progress)


@dataclass(frozen=True, slots=True)
class NewbobState:
    """The rate of the epoch to be trained, the loss of the one before it, and the phase."""

    rate: float
    previous_loss: float | None
    is_halving: bool


@dataclass(frozen=True, slots=True)
class MinRateNewbob:
    """Min-rate newbob (paper 000 3.2): `initial` while each epoch lowers the loss by `threshold`.

    From the first epoch that does not, the rate is multiplied by `factor` after every epoch;
    training stops when that reaches `minimum`.
    """

    initial: float
    minimum: float
    threshold: float = 0.05
    factor: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.minimum < self.initial:
            raise ValueError(
                f"learning rates {self.initial} -> {self.minimum}: need 0 < minimum < initial"
            )
        for name in ("threshold", "factor"):
            if not 0 < getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: need 0 < {name} < 1")

    def begin(self) -> NewbobState:
        """The state of the first epoch."""
        return NewbobState(self.initial, None, False)

    def after_epoch(self, state: NewbobState, loss: float) -> NewbobState | None:
        """The next epoch's state, when that of `state` ended at `loss`; None to stop."""
        if not 0 <= loss < math.inf:
            raise ValueError(
                f"loss = {loss}: need a finite loss, not below 0: training has diverged, "
                "begin again with a lower initial learning rate"
            )
        if not (state.is_halving or self._is_slow(state.previous_loss, loss)):
            return NewbobState(state.rate, loss, False)
        rate = state.rate * self.factor
        return NewbobState(rate, loss, True) if rate > self.minimum else None

    def _is_slow(self, previous_loss: float | None, loss: float) -> bool:
        if previous_loss is None:
            return False
        # At a loss of 0 there is no reduction left, relative or not.
        return loss == 0 or previous_loss - loss < self.threshold * previous_loss


@dataclass(frozen=True, slots=True)
class SubEpoch:
    """One stretch of training: which share of which data, how, and at what rate.

    A validation sub-epoch is to what labelled training sub-epochs leave out.
    """

    labelled: bool
    share: int
    num_shares: int
    offset: int
    whole_utterances: bool
    learning_rate: float
    is_validation: bool = False


def supervised_sub_epochs(
    decay: ExponentialDecay, num_chunked_epochs: int, num_epochs: int
) -> list[SubEpoch]:
    """Epochs over the labelled data, the offset rotating, whole utterances at the end (II-B)."""
    return [
        SubEpoch(True, 0, 1, epoch % STACK, epoch >= num_chunked_epochs, decay.learning_rate(epoch))
        for epoch in range(num_epochs)
    ]


def scheduled_learning_sub_epochs(
    decay: ExponentialDecay,
    num_sub_epochs: int,
    num_passes: int,
    num_whole: int,
    labelled_rate_factor: float,
    num_labelled_shares: int,
) -> list[SubEpoch]:
    """Sub-epochs of unlabelled data with labelled data after each, at a higher rate (V-D).

    The paper makes one pass of 18 sub-epochs, the last 3 on whole utterances; after each sub-epoch
    one of `num_labelled_shares` of the labelled data is visited, in turn.
    """
    sub_epochs = []
    total = num_sub_epochs * num_passes
    for step in range(total):
        whole, rate = step >= total - num_whole, decay.learning_rate(step)
        sub_epochs.append(SubEpoch(False, step % num_sub_epochs, num_sub_epochs, 0, whole, rate))
        share, offset = step % num_labelled_shares, step // num_labelled_shares % STACK
        labelled_rate = rate * labelled_rate_factor
        sub_epochs.append(SubEpoch(True, share, num_labelled_shares, offset, whole, labelled_rate))
    return sub_epochs
