"""Hold a rank's model of AD-PSGD, which two threads change: steps, and exchanges with others."""

import threading
from dataclasses import dataclass, field

from jaxtyping import Float
from torch import Tensor

from training.algorithms.decentralized.mixing import exchanged_weights


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
