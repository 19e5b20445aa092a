"""Compute the optimal number of ranks of data-parallel SGD (paper 004 sections 2.1 to 2.3)."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MinibatchCosts:
    """MinibatchCosts holds the terms of eq. (4), in seconds of one rank.

    `frame` is T_calc^frm, of one frame. `postprocessing` is C T_calc^post, all passes of AdaGrad
    and momentum. `model_update` is T_calc^upd, which does not shrink with more ranks. `exchange` is
    T_comm^float, of gradients in float32, which `compression`, Z, divides: 32 for 1 bit.
    """

    frame: float
    postprocessing: float
    model_update: float
    exchange: float
    compression: float

    def __post_init__(self) -> None:
        for name in ("frame", "compression"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: need a finite number above 0")
        for name in ("postprocessing", "model_update", "exchange"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} = {getattr(self, name)}: need a finite number >= 0")

    @property
    def communication(self) -> float:
        """Return T_comm, the seconds of an exchange, which do not depend on the ranks (3.1)."""
        return self.exchange / self.compression

    def computation(self, num_frames: int | float, num_ranks: int | float) -> float:
        """Return T_calc of eq. (3), the seconds that so many ranks compute between exchanges."""
        shared = num_frames * self.frame + self.postprocessing
        return shared / num_ranks + self.model_update

    def seconds(self, minibatch_frames: int, num_ranks: int) -> float:
        """Return the seconds a minibatch where computation and communication alternate (5.1)."""
        return self.computation(minibatch_frames, num_ranks) + self.communication

    def double_buffered_seconds(self, minibatch_frames: int, num_ranks: int) -> float:
        """Return the seconds a minibatch with double buffering: two halves, each overlapped (2.2).

        Each half updates the model, so the fixed cost counts twice (5.1).
        """
        half = self.computation(minibatch_frames / 2, num_ranks)
        return 2 * max(half, self.communication)

    def optimal_num_ranks(self, minibatch_frames: int) -> float:
        """Return K of eq. (4), at which double-buffered computation takes as long as communication.

        It is infinite where communication takes no longer than the fixed cost: then no number of
        ranks saturates the link, and double buffering has no use (2.3).
        """
        headroom = self.communication - self.model_update
        if headroom <= 0:
            return math.inf
        return (minibatch_frames / 2 * self.frame + self.postprocessing) / headroom
