"""Compare what must be equal on ranks: settings by their values, tensors by digests of their bits.

A `Replica` is one rank's side at one moment. Its checksum of 32 bytes says whether ranks differ;
its claims, a text that ranks exchange where they do, say in what.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeAlias
from zlib import crc32

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

from training.distributed.gather import PendingGather, gather_text
from training.distributed.process_group import ProcessGroup
from training.tensor_digest import combine, digests

Facts: TypeAlias = Mapping[str, str]

DRIFTED = (
    "replicas have drifted apart: change the model on all ranks alike, or by steps of the "
    "trainer's optimizer alone, use hosts of one processor type, and resume from a checkpoint"
)


class TensorDigests:
    """TensorDigests are taken at once, on the tensors' device; the host waits only for `facts`."""

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
    """Comparison is under way from the moment it is made; `check` looks at it, a step later."""

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
