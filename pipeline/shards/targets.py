"""The target shard: the teacher's k best, in the row order of its feature shard (003 V-C).

An utterance has targets at one offset of the low frame rate, or at all three (003 II-B).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from pipeline.filterbank import FRAME_SHIFT_MS, STACK
from pipeline.kbest import KBest
from pipeline.settings import Offsets, require_below_k
from pipeline.shards.container import (
    Format,
    Row,
    common,
    kbest_from_cells,
    kbest_to_cells,
    read_rows,
    required,
    write_rows,
)
from pipeline.splicing import num_low_rate_frames

OFFSETS_ENTRY = "offsets"
"""The footer's entry of a shard at all offsets; a shard without it is at one."""

TAIL_ENTRY = "tail_samples"
"""The footer's entry of a shard whose last columns are drawn; a shard without it has none."""


@dataclass(frozen=True, slots=True, eq=False)
class KBestAtAllOffsets:
    """KBestAtAllOffsets: the low-rate frames of all three offsets, by their middle 10 ms frames.

    Row j has its middle at frame j + 1: it is row j // 3 of offset j % 3. F frames have F - 2 rows.
    """

    kbest: KBest

    @classmethod
    def of(cls, parts: Sequence[KBest]) -> "KBestAtAllOffsets":
        """Interleave the targets of offsets 0, 1 and 2 of one utterance."""
        columns = (
            [part.senones for part in parts],
            [part.logits for part in parts],
            [part.log_z for part in parts],
        )
        return cls(KBest(*map(_interleaved, columns), tail_samples=parts[0].tail_samples))

    def at(self, offset: int) -> KBest:
        """Return the targets of one offset: views, not copies."""
        return self.kbest.rows(slice(offset, None, STACK))


StoredKBest: TypeAlias = KBest | KBestAtAllOffsets
"""The soft targets of an utterance in a shard."""


@dataclass(frozen=True, slots=True)
class StoredForm:
    """StoredForm: what a footer states of its shard's soft targets, beside their bytes."""

    k: int
    tail_samples: int
    offsets: Offsets

    @classmethod
    def of(cls, targets: Sequence[StoredKBest]) -> "StoredForm":
        """Return the form that all targets share, k = 0 for none; ValueError if they differ."""
        stored = [stored_rows(each) for each in targets]
        return cls(
            common("k", (each.senones.shape[1] for each in stored), 0),
            common("tail_samples", (each.tail_samples for each in stored), 0),
            common("offsets", map(offsets_of, targets), "one"),
        )

    @property
    def footer(self) -> dict[str, str]:
        """The footer's entries: k, and those of drawn columns and of all offsets if there are."""
        return {
            "k": str(self.k),
            **({TAIL_ENTRY: str(self.tail_samples)} if self.tail_samples else {}),
            **({OFFSETS_ENTRY: self.offsets} if self.offsets != "one" else {}),
        }

    @classmethod
    def stated(cls, footer: Mapping[str, str]) -> "StoredForm":
        """Read the form from a footer."""
        k, tail_samples = _stated_count(footer, "k"), 0
        if TAIL_ENTRY in footer:
            tail_samples = _stated_count(footer, TAIL_ENTRY, least=1)
            require_below_k(tail_samples, k)
        text = footer.get(OFFSETS_ENTRY)
        if text not in (None, "all"):
            raise ValueError(f"footer entry {OFFSETS_ENTRY} = {text!r}: need 'all', or none")
        return cls(k, tail_samples, "one" if text is None else "all")


def _stated_count(footer: Mapping[str, str], name: str, least: int = 0) -> int:
    text = footer.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 5 and int(text) >= least):
        raise ValueError(f"footer entry {name} = {text!r}: need a count from {least} on")
    return int(text)


def _interleaved(columns: Sequence[np.ndarray]) -> np.ndarray:
    first = columns[0]
    rows = np.empty((sum(map(len, columns)), *first.shape[1:]), first.dtype)
    for offset, column in enumerate(columns):
        rows[offset::STACK] = column
    return rows


def at_offset(targets: StoredKBest, offset: int) -> KBest:
    """Return the targets at one offset; those that are at one alone are at `offset`."""
    return targets.at(offset) if isinstance(targets, KBestAtAllOffsets) else targets


def stored_rows(targets: StoredKBest) -> KBest:
    """Return all rows that a shard holds of an utterance's soft targets."""
    return targets.kbest if isinstance(targets, KBestAtAllOffsets) else targets


def from_stored_rows(kbest: KBest, offsets: Offsets) -> StoredKBest:
    """Invert `stored_rows`."""
    return KBestAtAllOffsets(kbest) if offsets == "all" else kbest


def offsets_of(targets: StoredKBest) -> Offsets:
    """Return whether targets are at one offset or at all."""
    return "all" if isinstance(targets, KBestAtAllOffsets) else "one"


def num_stored_rows(num_frames: int, offset: int, offsets: Offsets) -> int:
    """Count the rows that `num_frames` 10 ms frames have, at `offset` or at all."""
    own = num_low_rate_frames(num_frames, offset)
    return own if offsets == "one" else max(0, num_frames - 2)


_FORMAT = Format(
    pa.schema(
        [
            required("utterance_id", pa.string()),
            required("offset", pa.int32()),
            required("num_low_rate_frames", pa.int32()),
            # At k = 20, senones and logits take 80 bytes a low-rate frame, log Z takes 2.
            required("senones", pa.binary()),
            required("logits", pa.binary()),
            required("log_z", pa.binary()),
        ]
    ),
    {"shard": "targets", "dtype": "float16", "frame_shift_ms": str(STACK * FRAME_SHIFT_MS)},
)


@dataclass(frozen=True, slots=True, eq=False)
class TargetRow:
    """One utterance's k-best targets at low rate, at `offset` or at all three, from `offset` on."""

    utterance_id: str
    offset: int
    kbest: StoredKBest


def write_targets(rows: Sequence[TargetRow]) -> bytes:
    """Write a target shard; the footer states the rows' common k and form."""
    form = StoredForm.of([row.kbest for row in rows])
    return write_rows(_FORMAT, (_to_cells(row, form.k) for row in rows), **form.footer)


def read_targets(data: bytes) -> list[TargetRow]:
    """Read a target shard in stored order; arrays are read-only views of `data`.

    ValueError for damaged bytes or tensors of another size than stated.
    """
    rows, footer = read_rows(_FORMAT, data)
    form = StoredForm.stated(footer)
    return [_from_cells(row, form) for row in rows]


def _to_cells(row: TargetRow, k: int) -> Row:
    kbest = stored_rows(row.kbest)
    num_frames = len(kbest.log_z)
    _require_offset(row.offset, row.utterance_id)
    return {
        "utterance_id": row.utterance_id,
        "offset": row.offset,
        "num_low_rate_frames": num_frames,
        **kbest_to_cells(kbest, num_frames, k, row.utterance_id),
    }


def _from_cells(cells: dict[str, Any], form: StoredForm) -> TargetRow:
    where = cells["utterance_id"]
    _require_offset(cells["offset"], where)
    shape = cells["num_low_rate_frames"], form.k
    kbest = kbest_from_cells(cells, shape, form.tail_samples, where)
    return TargetRow(where, cells["offset"], from_stored_rows(kbest, form.offsets))


def _require_offset(offset: int, where: str) -> None:
    if not 0 <= offset < STACK:
        raise ValueError(f"{where}: offset = {offset}: need 0..{STACK - 1}")
