"""The target shard: the teacher's k best, in the row order of its feature shard (003 V-C)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.filterbank import FRAME_SHIFT_MS
from pipeline.kbest import KBest
from pipeline.shards.container import Format, Row, read_rows, required, write_rows
from pipeline.shards.tensors import kbest_from_cells, kbest_to_cells
from pipeline.splicing import STACK

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
    """One utterance's k-best targets at low rate, for the stated offset of the stacking."""

    utterance_id: str
    offset: int
    kbest: KBest


def write_targets(rows: Sequence[TargetRow]) -> bytes:
    """Write a target shard; all rows keep the same k, which the footer states."""
    k = common_k([row.kbest for row in rows])
    return write_rows(_FORMAT, (_to_cells(row, k) for row in rows), k=str(k))


def read_targets(data: bytes) -> list[TargetRow]:
    """Read a target shard in stored order; arrays are read-only views of `data`.

    ValueError for damaged bytes or tensors of another size than stated.
    """
    rows, footer = read_rows(_FORMAT, data)
    k = stated_k(footer)
    return [_from_cells(row, k) for row in rows]


def common_k(targets: Sequence[KBest]) -> int:
    """Return the k of all `targets`, 0 if there are none."""
    ks = {kbest.senones.shape[1] for kbest in targets}
    if len(ks) > 1:
        raise ValueError(f"k = {sorted(ks)}: need one k for the whole shard")
    return ks.pop() if ks else 0


def stated_k(footer: Mapping[str, str]) -> int:
    """Read k from a footer."""
    text = footer.get("k", "")
    if not (text.isascii() and text.isdecimal() and len(text) <= 5):
        raise ValueError(f"footer entry k = {text!r}: need a count of senones")
    return int(text)


def _to_cells(row: TargetRow, k: int) -> Row:
    num_frames = len(row.kbest.log_z)
    _require_offset(row.offset, row.utterance_id)
    return {
        "utterance_id": row.utterance_id,
        "offset": row.offset,
        "num_low_rate_frames": num_frames,
        **kbest_to_cells(row.kbest, num_frames, k, row.utterance_id),
    }


def _from_cells(cells: dict[str, Any], k: int) -> TargetRow:
    where = cells["utterance_id"]
    _require_offset(cells["offset"], where)
    kbest = kbest_from_cells(cells, cells["num_low_rate_frames"], k, where)
    return TargetRow(where, cells["offset"], kbest)


def _require_offset(offset: int, where: str) -> None:
    if not 0 <= offset < STACK:
        raise ValueError(f"{where}: offset = {offset}: need 0..{STACK - 1}")
