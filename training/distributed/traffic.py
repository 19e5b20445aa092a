"""Count the bytes that this rank gives to the exchanges of a group, and those that leave it."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from threading import Lock
from weakref import WeakKeyDictionary

from training.distributed.process_group import ProcessGroup

_bytes_sent: "WeakKeyDictionary[ProcessGroup, tuple[int, int]]" = WeakKeyDictionary()
_lock = Lock()
"""A rank may exchange in a thread beside its steps; a sum that both change at once loses bytes."""


def count_sent(num_bytes: int, group: ProcessGroup, wire_bytes: int) -> None:
    """Count a message once, however many ranks receive it, and its copies on their way from here.

    `wire_bytes` are those that leave this rank, on its own behalf and for others on a ring or a
    tree. A rank alone sends nothing.
    """
    if group.size() > 1:
        with _lock:
            sent, wire = _bytes_sent.get(group, (0, 0))
            _bytes_sent[group] = sent + num_bytes, wire + wire_bytes


def sum_wire_bytes(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes that leave a rank in gloo's ring: 2 (L - 1) messages of an L-th each."""
    return 2 * (num_ranks - 1) * num_bytes // num_ranks


def broadcast_wire_bytes(num_bytes: int, rank: int, num_ranks: int) -> int:
    """Return the bytes that leave a rank in gloo's binomial tree, whose root is rank 0."""
    masks = [1 << step for step in range((num_ranks - 1).bit_length())]
    return num_bytes * sum(rank % (2 * mask) == 0 and rank + mask < num_ranks for mask in masks)


class Traffic:
    """Traffic counts the bytes that are sent in some parts of a program.

    `num_bytes` counts each message once, `num_wire_bytes` all that left this rank.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_wire_bytes = 0

    @contextmanager
    def counting(self, groups: Collection[ProcessGroup]) -> Iterator[None]:
        """Count what is sent in any of `groups` within."""
        before = _sums(groups)
        yield
        after = _sums(groups)
        self.add(after[0] - before[0], after[1] - before[1])

    def add(self, num_bytes: int, num_wire_bytes: int) -> None:
        """Add what was sent in a part that no `counting` sees."""
        with _lock:
            self.num_bytes += num_bytes
            self.num_wire_bytes += num_wire_bytes


def _sums(groups: Collection[ProcessGroup]) -> tuple[int, int]:
    counts = [_bytes_sent.get(group, (0, 0)) for group in groups]
    return sum(sent for sent, _ in counts), sum(wire for _, wire in counts)
