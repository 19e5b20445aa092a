"""Gathering what each rank has, as much as it has: straight from rank to rank, or round a ring."""

import platform
from dataclasses import dataclass
from weakref import WeakKeyDictionary
from zlib import crc32

import torch
from jaxtyping import Int32
from torch import Tensor

from training.distributed.collectives import ProcessGroup, explained

MAX_ROOM = 2**16
"""Values that may travel along with their number: of 1 MB a ring is faster than copies."""

HOST_NAME_BYTES = 256

_known: "WeakKeyDictionary[ProcessGroup, _Known]" = WeakKeyDictionary()


def gather(
    values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str
) -> list[Int32[Tensor, " values_of_rank"]]:
    """Every rank's `values`, in rank order; each rank may have another number of them, or none.

    Raises CollectiveError where a rank gathers for another purpose, so that one rank's last step is
    never taken for another's next.
    """
    lengths, beginnings = _gather_beginnings(values, group, purpose)
    longest = max(lengths)
    if longest <= beginnings.shape[1]:
        rows = beginnings
    else:
        padded = values.new_zeros(longest)
        padded[: len(values)] = values
        rows = gather_equal(padded, group, purpose)
    return [row[:length] for row, length in zip(rows, lengths, strict=True)]


def _gather_beginnings(
    values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str
) -> tuple[list[int], Int32[Tensor, "ranks room"]]:
    """How many values each rank has; between ranks of one host, the first of them too."""
    known = _known_of(group, values.device)
    # The same for every purpose: gloo ends a process that meets another length than its own.
    sent = values.new_zeros(2 + known.room)
    sent[0], sent[1] = len(values), crc32(purpose.encode()) >> 1
    sent[2 : 2 + len(values)] = values[: known.room]
    with explained(f"gather of {purpose}", group):
        gathered = _exchange_directly(sent, group)
        elsewhere = (gathered[:, 1] != sent[1]).nonzero().squeeze(1).tolist()
        if elsewhere:
            raise RuntimeError(f"ranks {elsewhere} are at another point of training")
    lengths: list[int] = gathered[:, 0].tolist()
    known.expect(max(lengths))
    return lengths, gathered[:, 2:]


@dataclass(slots=True)
class _Known:
    """What all ranks of a group know alike: their hosts, and how many values to expect."""

    hosts: list[str]
    room: int = 0

    def expect(self, longest: int) -> None:
        """Make room for a quarter more than went last time: one exchange instead of two."""
        room = 1 << (longest + longest // 4).bit_length()
        is_direct = room <= MAX_ROOM and len(set(self.hosts)) == 1
        self.room = room if is_direct else 0


def hosts(group: ProcessGroup, device: torch.device) -> list[str]:
    """The name of each rank's host; all ranks must call this together, the first time."""
    return _known_of(group, device).hosts


def _known_of(group: ProcessGroup, device: torch.device) -> _Known:
    if group not in _known:
        name = platform.node().encode()[:HOST_NAME_BYTES].ljust(HOST_NAME_BYTES, b"\0")
        codes = torch.frombuffer(bytearray(name), dtype=torch.int32).to(device)
        with explained("gather of host names", group):
            rows = _exchange_directly(codes, group).cpu()
        names = [row.numpy().tobytes().rstrip(b"\0") for row in rows]
        _known[group] = _Known([each.decode(errors="replace") for each in names])
    return _known[group]


def _exchange_directly(
    values: Int32[Tensor, " values"], group: ProcessGroup
) -> Int32[Tensor, "ranks values"]:
    # Straight from each rank to each: of 8 KB in under half the time of gather_equal's ring, which
    # takes a round for each rank, but crosses a link between hosts only once for each message.
    gathered = values.new_empty(group.size() * len(values))
    group.all_to_all_single(gathered, values.repeat(group.size()), [], []).wait()
    return gathered.view(group.size(), len(values))


def gather_equal(
    values: Int32[Tensor, " values"], group: ProcessGroup, purpose: str
) -> Int32[Tensor, "ranks values"]:
    """Every rank's `values`, equally many on all; on a GPU nothing waits for it."""
    gathered = values.new_empty(group.size() * len(values))
    with explained(f"gather of {purpose}", group):
        group.all_gather_single(gathered, values).wait()
    return gathered.view(group.size(), len(values))


def gather_text(text: str, group: ProcessGroup, purpose: str, device: torch.device) -> list[str]:
    """Every rank's `text`, in rank order, through memory of `device`."""
    codes = torch.tensor([ord(character) for character in text], dtype=torch.int32, device=device)
    rows = gather(codes, group, purpose)
    return [row.cpu().numpy().tobytes().decode("utf-32-le") for row in rows]
