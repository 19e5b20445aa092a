"""The time that a device's batches take, by which a stuck device is noticed."""

import threading
import time
from collections import OrderedDict

_LEAST_LIMIT_S = 20.0
_TIMES_THE_SLOWEST = 20.0


class BatchWatch:
    """BatchWatch times the oldest unfinished batch against the slowest one so far, by the frame.

    The first batch has `first_limit_s`, as nothing is known of the device yet. Batches overlap, so
    a batch's time begins when the one before it ends. Safe for threads.
    """

    def __init__(self, first_limit_s: float) -> None:
        self._first_limit_s = first_limit_s
        self._slowest_s = 0.0  # a frame
        self._begun: OrderedDict[int, int] = OrderedDict()
        self._oldest_since_s = 0.0
        self._changed = threading.Condition()

    def begin(self, batch: int, num_frames: int) -> None:
        """Note that the batch `batch` was taken."""
        with self._changed:
            if not self._begun:
                self._oldest_since_s = time.monotonic()
            self._begun[batch] = max(1, num_frames)

    def end(self, batch: int) -> None:
        """Note that a batch was answered, or failed."""
        with self._changed:
            now_s = time.monotonic()
            num_frames = self._begun.pop(batch)
            self._slowest_s = max(self._slowest_s, (now_s - self._oldest_since_s) / num_frames)
            self._oldest_since_s = now_s
            self._changed.notify_all()

    def wait_until_idle(self) -> None:
        """Wait until no batch is in work."""
        with self._changed:
            self._changed.wait_for(lambda: not self._begun)

    def overdue(self) -> str:
        """Return why the device counts as stuck, or an empty text."""
        with self._changed:
            if not self._begun:
                return ""
            num_frames = next(iter(self._begun.values()))
            limit_s = max(_LEAST_LIMIT_S, _TIMES_THE_SLOWEST * self._slowest_s * num_frames)
            if not self._slowest_s:
                limit_s = self._first_limit_s
            taken_s = time.monotonic() - self._oldest_since_s
        late = f"a batch of {num_frames} frames takes {taken_s:.0f} s: the limit is {limit_s:.0f} s"
        return late if taken_s > limit_s else ""
