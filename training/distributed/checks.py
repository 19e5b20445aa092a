"""Check that ranks hold the same settings and tensors, and that gradients are finite.

A `Replica` is one rank's side of a comparison at one moment. Its checksum of 32 bytes says whether
ranks differ; its claims, a text that ranks exchange where they do, say in what. Tensors are
compared by digests of 64 bits, which their own device takes at the memory's speed: 7 ms for 25 M
float32 on one CPU core. A digest is a sum over short rows: the sum of a row's bits times an odd
number of the row's own, modulo 2^64.

The rank and the step where a gradient first was not finite are found without waiting for a GPU.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeAlias
from zlib import crc32

import torch
from jaxtyping import Bool, Float, Int32, Int64, Shaped, UInt8
from torch import Tensor

from training.distributed.collectives import Arrival, PendingGather, gather_equal, gather_text
from training.distributed.process_group import ProcessGroup, is_read_at_once

Facts: TypeAlias = Mapping[str, str]

DRIFTED = (
    "replicas have drifted apart: change the model on all ranks alike, or by steps of the "
    "trainer's optimizer alone, use hosts of one processor type, and resume from a checkpoint"
)


class TensorDigests:
    """TensorDigests are computed at once, on the tensors' device; only `facts` waits for it."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device) -> None:
        self._names = list(tensors)
        self._values: Int64[Tensor, " tensors"] = digests(list(tensors.values()), device)

    def checksum(self) -> Int64[Tensor, ""]:
        """Return one number for all."""
        return combine(self._values)

    def facts(self) -> Facts:
        """Return the digests by the tensors' names."""
        values = self._values.tolist()
        pairs = zip(self._names, values, strict=True)
        return {name: f"digest {value % 2**64:016x}" for name, value in pairs}


@dataclass(frozen=True, slots=True)
class Claims:
    """Claims holds what one rank says must be equal, by name; `problem` ends all ranks.

    `of_part` is equal only on the ranks that have the same `part`.
    """

    problem: str = ""
    settings: Facts = field(default_factory=dict)
    tensors: Facts = field(default_factory=dict)
    part: int = 0
    of_part: Facts = field(default_factory=dict)

    def to_json(self) -> str:
        """Write what `check_equal` reads."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class Replica:
    """Replica is one rank's side of a comparison, at one moment."""

    settings: Facts
    tensors: TensorDigests
    part: int
    of_part: TensorDigests

    def claims(self, problem: str = "") -> Claims:
        """Return what the ranks compare in full; the host waits for the tensors' device."""
        of_part = self.of_part.facts()
        return Claims(problem, self.settings, self.tensors.facts(), self.part, of_part)

    def checksum(self) -> Int32[Tensor, " words"]:
        """Return 16 bytes for all ranks and 16 of the part; the host does not wait."""
        tensors = self.tensors.checksum()
        settings = torch.full_like(tensors, crc32(json.dumps(dict(self.settings)).encode()))
        part = torch.full_like(tensors, self.part)
        numbers = [tensors, settings, part, self.of_part.checksum()]
        return torch.stack(numbers).view(torch.int32)


class Comparison:
    """Comparison starts when it is made; `check` reads its result, a step later."""

    def __init__(self, replica: Replica, group: ProcessGroup) -> None:
        self._replica = replica
        self._group = group
        self._checksums = PendingGather(replica.checksum(), group, "checksums")

    def check(self) -> None:
        """Raise ValueError, on all ranks, where ranks differed; it names the rank and in what."""
        rows = self._checksums.rows()
        device = rows.device
        numbers: list[list[int]] = rows.view(torch.int64).tolist()
        everywhere = {tuple(row[:2]) for row in numbers}
        of_parts = {tuple(row[2:]) for row in numbers}
        if len(everywhere) > 1 or len(of_parts) > len({part for part, _ in of_parts}):
            # The claims are of the checksums' moment, so they differ as the checksums did.
            compare(self._replica.claims(), self._group, device)


def compare(claims: Claims, group: ProcessGroup, device: torch.device) -> None:
    """Compare in full; all ranks must call this together. Raises as `check_equal` does."""
    check_equal(gather_text(claims.to_json(), group, "settings", device))


def check_equal(texts: Sequence[str]) -> None:
    """Raise ValueError for the first difference between the claims of ranks, in rank order.

    The message names a rank that differs from most, or from rank 0 where there is no majority.
    """
    claims = [Claims(**json.loads(text)) for text in texts]
    for rank, each in enumerate(claims):
        if each.problem:
            raise ValueError(f"rank {rank}: {each.problem}")
    everyone = range(len(claims))
    _check([each.settings for each in claims], everyone, "need the same on all ranks of the group")
    _check([each.tensors for each in claims], everyone, DRIFTED)
    for part in {each.part for each in claims}:
        ranks = [rank for rank in everyone if claims[rank].part == part]
        _check([claims[rank].of_part for rank in ranks], ranks, DRIFTED)


def _check(facts: Sequence[Facts], ranks: Sequence[int], remedy: str) -> None:
    for name in dict.fromkeys(name for each in facts for name in each):
        values = [each.get(name) for each in facts]
        usual, count = Counter(values).most_common(1)[0]
        if count < len(values):
            odd = next(index for index, value in enumerate(values) if value != usual)
            others = ranks[values.index(usual)]
            raise ValueError(
                f"{name}: {values[odd]} on rank {ranks[odd]}, {usual} on rank {others}: {remedy}"
            )


def not_finite(rank: int, step: int) -> FloatingPointError:
    """Make the error of a gradient that is not finite."""
    return FloatingPointError(
        f"the gradient of rank {rank} holds a NaN or an infinity, first at step {step}: look at "
        "that rank's data, or lower the learning rate, and resume from a checkpoint"
    )


def all_finite(tensors: Iterable[Float[Tensor, "..."]]) -> Bool[Tensor, ""]:
    """Return whether all elements of all tensors are finite, without waiting for a GPU."""
    parts = [each._values() if each.is_sparse else each.detach() for each in tensors]
    # On a CPU isfinite() takes 180 ms for 25 M elements. A NaN or an infinity is always among the
    # extremes, which take 5 ms, the time to read the elements; a sum takes 7 and may overflow.
    if all(is_read_at_once(part.device) for part in parts):
        extremes = (each for part in parts if part.numel() for each in part.aminmax())
        return torch.tensor(all(math.isfinite(float(each)) for each in extremes))
    # A GPU's are not looked at here. One launch for all tensors: sums of 22, each in float64, took
    # the host 1.5 ms of a step of 4.8 on an H100. A maximum keeps a NaN, and never overflows.
    largest = torch._foreach_norm([part for part in parts if part.numel()], torch.inf)
    return torch.isfinite(torch.stack(largest)).all()


class FirstFault:
    """FirstFault holds the first step at which this rank's gradients were not finite, 0 if none."""

    def __init__(self, device: torch.device) -> None:
        self.step: Int64[Tensor, ""] = torch.zeros((), dtype=torch.int64, device=device)

    def note(self, step: int, gradients: Iterable[Float[Tensor, "..."]]) -> None:
        """Look at the gradients of `step`."""
        is_first = ~all_finite(gradients) & (self.step == 0)
        self.step.masked_fill_(is_first, step)

    def clear(self) -> None:
        """Reset: an exchange has shown that all is finite."""
        self.step.zero_()

    def check(self, rank: int) -> None:
        """Raise FloatingPointError, on this rank alone, if there was one."""
        if step := int(self.step):
            raise not_finite(rank, step)


class FiniteCheck:
    """FiniteCheck looks at what ranks have exchanged, so that it costs no exchange of its own.

    A NaN of one rank is in every rank's sum, and all ranks raise together: at once on a CPU, a step
    later on a GPU. Errors number the ranks from `first_rank` on, that of the group's rank 0.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, first_rank: int = 0) -> None:
        self._group = group
        self._first_rank = first_rank
        self._device = device
        self._is_late = not is_read_at_once(device)
        self._pending: tuple[int, Arrival] | None = None

    def examine(
        self,
        step: int,
        exchanged: Sequence[Float[Tensor, "..."]],
        fault: Callable[[], Int64[Tensor, ""]],
    ) -> None:
        """Examine what all ranks now hold; `fault` returns this rank's `FirstFault.step`."""
        is_finite = all_finite(exchanged)
        if self._is_late:
            self._pending = step, Arrival(torch.stack([is_finite.long(), fault()]))
        elif not is_finite:
            self._report(step, int(fault()))

    def check(self) -> None:
        """Raise FloatingPointError, on all ranks, where the last examination on a GPU found one."""
        if self._pending is None:
            return
        (step, arrival), self._pending = self._pending, None
        is_finite, fault = arrival.values().tolist()
        if not is_finite:
            self._report(step, fault)

    def _report(self, step: int, fault: int) -> None:
        own = torch.tensor([fault], dtype=torch.int32, device=self._device)
        faults = gather_equal(own, self._group, "gradients that are not finite").flatten().tolist()
        found = [(first, rank) for rank, first in enumerate(faults) if first]
        if found:
            first, rank = min(found)
            raise not_finite(self._first_rank + rank, first)
        raise FloatingPointError(
            f"what the ranks exchanged at step {step} overflows, though each rank's gradient is "
            "finite: lower the learning rate, and resume from a checkpoint"
        )


ROW_WORDS = 64
WORD_BYTES = 8
ROW_BYTES = ROW_WORDS * WORD_BYTES
ODD_NUMBER = 0x1E3779B97F4A7C15


def digests(
    tensors: Sequence[Shaped[Tensor, "..."]], device: torch.device
) -> Int64[Tensor, " tensors"]:
    """Digest each tensor's bits on its own device; collect the digests on `device` without waiting.

    Two tensors of random differences have equal digests with a chance of 2^-64. Differences that
    cancel within one row, of 128 float32, are missed.
    """
    values = torch.zeros(len(tensors), dtype=torch.int64, device=device)
    for number, tensor in enumerate(tensors):
        values[number] = _digest(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    return values


def combine(values: Int64[Tensor, " values"]) -> Int64[Tensor, ""]:
    """Digest digests, or other words, to one number; their order counts."""
    odd_numbers = (2 * torch.arange(len(values), device=values.device) + 1) * ODD_NUMBER
    return (values * odd_numbers).sum()


def _digest(data: UInt8[Tensor, " bytes"]) -> Int64[Tensor, ""]:
    num_rows = len(data) // ROW_BYTES
    body, rest = data[: num_rows * ROW_BYTES], data[num_rows * ROW_BYTES :]
    if body.storage_offset() % WORD_BYTES:  # torch reads words at multiples of their size alone
        body = body.clone()
    row_sums = body.view(torch.int64).view(num_rows, ROW_WORDS).sum(1)
    last_row = data.new_zeros(ROW_BYTES)
    last_row[: len(rest)] = rest
    # Each word of the last row counts as a row, so that no difference in a bias cancels.
    return combine(torch.cat([last_row.view(torch.int64), row_sums])) + len(data)
