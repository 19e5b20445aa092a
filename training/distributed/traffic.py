"""Count the bytes that this rank gives to the exchanges of a group."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from torch import Tensor

from training.distributed.process_group import ProcessGroup

_bytes_sent: "WeakKeyDictionary[ProcessGroup, int]" = WeakKeyDictionary()


def count_sent(values: Tensor, group: ProcessGroup) -> None:
    """Count `values` once, however many ranks receive them; a rank alone sends nothing."""
    if group.size() > 1:
        _bytes_sent[group] = _bytes_sent.get(group, 0) + values.nbytes


class Traffic:
    """Traffic counts the bytes that are sent in some parts of a program."""

    def __init__(self) -> None:
        self.num_bytes = 0

    @contextmanager
    def counting(self, groups: Collection[ProcessGroup]) -> Iterator[None]:
        """Count what is sent in any of `groups` within."""
        before = _sum(groups)
        yield
        self.num_bytes += _sum(groups) - before


def _sum(groups: Collection[ProcessGroup]) -> int:
    return sum(_bytes_sent.get(group, 0) for group in groups)
