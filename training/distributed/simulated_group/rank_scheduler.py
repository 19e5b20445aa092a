"""Run the threads of simulated ranks one at a time, in an order that does not change."""

import threading
from collections import deque
from collections.abc import Sequence

from training.distributed.simulated_group.shared_device import SharedDevice


class DeadlockError(RuntimeError):
    """DeadlockError reports that all unfinished ranks wait for others, and each one's exchange."""


class RankScheduler:
    """RankScheduler lets one rank run; the others are ready, or blocked in an exchange."""

    def __init__(self, num_ranks: int, device: SharedDevice) -> None:
        self._device = device
        self._wakes = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._ready = deque(range(num_ranks))
        self._blocked: dict[int, str] = {}
        self._deadlock: DeadlockError | None = None

    def wait(self, rank: int) -> None:
        """Sleep until this rank is scheduled; raise DeadlockError if it never will be."""
        self._wakes[rank].acquire()
        if self._deadlock is not None:
            raise self._deadlock

    def block(self, rank: int, operation: str) -> None:
        """Run other ranks until the exchange that this rank waits for is complete."""
        self._blocked[rank] = operation
        self._run_others(rank)

    def pass_turn(self, rank: int) -> None:
        """Run the other ranks that are ready, where this rank's work is under way meanwhile."""
        # A rank that kept its turn for a block of steps would fill the GPU's queue by itself.
        if self._device.queues_work and self._ready:
            self._ready.append(rank)
            self._run_others(rank)

    def _run_others(self, rank: int) -> None:
        # Other ranks change torch's random state, which threads share.
        random_state = self._device.random_state()
        self.run_next()
        self.wait(rank)
        self._device.set_random_state(random_state)

    def unblock(self, ranks: Sequence[int]) -> None:
        """Make ranks ready whose exchange is complete."""
        for rank in ranks:
            self._blocked.pop(rank, None)
            self._ready.append(rank)

    def run_next(self) -> None:
        """Wake the next ready rank; if there are only blocked ones, wake them to raise an error."""
        if self._ready:
            self._wakes[self._ready.popleft()].release()
        # One rank runs at a time, so none ready and some blocked is a certain deadlock.
        elif self._blocked and self._deadlock is None:
            where = ", ".join(f"rank {rank} in {what}" for rank, what in self._blocked.items())
            self._deadlock = DeadlockError(
                f"the ranks that have not finished wait for others: {where}. All ranks must take "
                "the same number of steps"
            )
            for rank in self._blocked:
                self._wakes[rank].release()
