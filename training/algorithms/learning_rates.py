"""Compute learning rates: exponential decay, min-rate newbob, warm-up (003 II-B, V-F, 000 3.2)."""

import math
from dataclasses import dataclass

SLOW_REDUCTION = 0.05
FACTOR = 0.5
"""Paper 000 3.2: halve the rate from the first epoch that lowers the loss by less than 5 %."""


def exponential_decay(initial: float, final: float, num_epochs: int) -> list[float]:
    """Return the rates of the epochs, from `initial` to `final` by a constant factor."""
    # 003 II-B names an exponential decay without its factor, so both ends are given.
    progress = [epoch / max(num_epochs - 1, 1) for epoch in range(num_epochs)]
    return [float(initial * (final / initial) ** part) for part in progress]


def warm_up_factor(num_steps: int, warm_up_steps: int) -> float:
    """Return the share of the learning rate at a step, after `num_steps` others: a linear rise.

    Many ranks are a large minibatch, whose first steps a warm-up keeps small (003 V-F).
    """
    return min((num_steps + 1) / warm_up_steps, 1.0) if warm_up_steps else 1.0


@dataclass(frozen=True, slots=True)
class NewbobState:
    """NewbobState is the next epoch's rate, the loss of the epoch before it, and the phase."""

    rate: float
    previous_loss: float | None
    is_halving: bool


@dataclass(frozen=True, slots=True)
class MinRateNewbob:
    """MinRateNewbob keeps the `initial` rate while each epoch lowers the loss by 5 %.

    After the first epoch that does not, it halves the rate after every epoch, and stops when the
    rate reaches `minimum` (paper 000 3.2).
    """

    initial: float
    minimum: float

    def begin(self) -> NewbobState:
        """Return the state of the first epoch."""
        return NewbobState(self.initial, None, False)

    def after_epoch(self, state: NewbobState, loss: float) -> NewbobState | None:
        """Return the state after the epoch of `state` has ended at `loss`, or None to stop."""
        if not 0 <= loss < math.inf:
            raise ValueError(
                f"loss = {loss}: need a finite loss, not below 0: training has diverged, "
                "start again with a lower initial learning rate"
            )
        # Phase 1 ends with the first slow epoch; phase 2 lowers the rate after every epoch.
        before = state.previous_loss
        # At a loss of 0 there is no reduction left, relative or not.
        is_slow = before is not None and (loss == 0 or before - loss < SLOW_REDUCTION * before)
        if not (state.is_halving or is_slow):
            return NewbobState(state.rate, loss, False)
        rate = state.rate * FACTOR
        return NewbobState(rate, loss, True) if rate > self.minimum else None
