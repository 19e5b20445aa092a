"""The target shard: the teacher's k best, in the row order of its feature shard (003 V-C)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline.filterbank import FRAME_SHIFT_MS
from pipeline.shards.container import Format, Row, read_rows, required, write_rows
from pipeline.shards.stored_kbest import (
    StoredForm,
    StoredKBest,
    footer_of,
    from_stored_rows,
    stated_k,
    stored_rows,
)
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
    """One utterance's k-best targets at low rate, at `offset` or at all three, from `offset` on."""

    utterance_id: str
    offset: int
    kbest: StoredKBest


def write_targets(rows: Sequence[TargetRow]) -> bytes:
    """Write a target shard; the footer states the rows' common k and form."""
    footer = footer_of([row.kbest for row in rows])
    return write_rows(_FORMAT, (_to_cells(row, stated_k(footer)) for row in rows), **footer)


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
