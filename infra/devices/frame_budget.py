"""The frames of a batch that fit into a device's memory, as out of memory errors teach it."""

from dataclasses import dataclass

_GOOD_BATCHES = 256
"""So many batches in succession let the budget grow by an eighth: a failed try takes seconds."""


@dataclass(slots=True)
class FrameBudget:
    """FrameBudget: fewer padded frames a batch than did not fit, and `max_frames` at most."""

    max_frames: int
    num_frames: int = 0
    _num_good: int = 0

    def __post_init__(self) -> None:
        self.num_frames = self.max_frames

    def shrink(self, num_frames: int) -> None:
        """Take less than a batch's padded frames, which did not fit, as the budget."""
        # Not half of them: then whether a batch is divided would depend on those before it.
        self.num_frames = max(1, min(self.num_frames, num_frames - 1))
        self._num_good = 0

    def grow(self) -> None:
        """Count a batch that fitted; many in succession raise the budget slowly."""
        self._num_good += 1
        if self._num_good >= _GOOD_BATCHES and self.num_frames < self.max_frames:
            self.num_frames = min(self.max_frames, self.num_frames + self.num_frames // 8 + 1)
            self._num_good = 0


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a device or the host had too little memory, by the names that torch uses.

    torch's class is found by its name, so that a server of another library needs no torch.
    """
    names = {each.__name__ for each in type(error).__mro__}
    if names & {"MemoryError", "OutOfMemoryError"}:
        return True
    texts = ("out of memory", "can't allocate memory", "ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)
