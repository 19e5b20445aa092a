"""The training partition: features joined with their targets, what a trainer reads (003 IV-B4)."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from jaxtyping import Float16, Float64, Int64, UInt16

from pipeline.filterbank import STACK
from pipeline.settings import Storage
from pipeline.shards.container import (
    FLOAT16,
    UINT16,
    Format,
    Row,
    common,
    from_buffer,
    kbest_from_cells,
    kbest_to_cells,
    read_columns,
    read_rows,
    required,
    to_bytes,
    write_rows,
)
from pipeline.shards.features import (
    FEATURE_FOOTER,
    features_from_cell,
    features_to_cell,
    stated_storage,
)
from pipeline.shards.targets import (
    StoredForm,
    StoredKBest,
    from_stored_rows,
    num_stored_rows,
    offsets_of,
    stored_rows,
)

_FORMAT = Format(
    pa.schema(
        [
            required("utterance_id", pa.string()),
            required("speaker_id", pa.string()),
            required("duration_ms", pa.int64()),
            pa.field("text", pa.string()),
            required("num_frames", pa.int32()),
            required("features", pa.binary()),
            pa.field("alignment", pa.binary()),
            required("offset", pa.int32()),
            pa.field("senones", pa.binary()),
            pa.field("logits", pa.binary()),
            pa.field("log_z", pa.binary()),
        ]
    ),
    {"shard": "partition", **FEATURE_FOOTER},
    # Partitions of utterances in placements have it.
    optional=(pa.field("placement", pa.string()),),
)
_LENGTHS = ("num_frames", "offset")


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """Alignment holds the senone of each 10 ms frame: the hard targets of an utterance."""

    senones: UInt16[np.ndarray, " frames"]


@dataclass(frozen=True, slots=True, eq=False)
class PartitionRow:
    """PartitionRow: an utterance to train on, with hard targets or the k best.

    These are of the low-rate frames at `offset`, or of those at all three, which begin with it.
    """

    utterance_id: str
    speaker_id: str
    duration_ms: int
    text: str | None
    features: Float16[np.ndarray, "frames bins"]
    targets: Alignment | StoredKBest
    offset: int
    storage: Storage = "float16"
    placement: str | None = None


def write_partition(rows: Sequence[PartitionRow]) -> bytes:
    """Write a training partition; its rows' common k, form and storage are in the footer."""
    soft = [row.targets for row in rows if not isinstance(row.targets, Alignment)]
    form = StoredForm.of(soft)
    storage: Storage = common("storage", (row.storage for row in rows), "float16")
    had = {"placement"} if any(row.placement is not None for row in rows) else set()
    cells = (_to_cells(row, form.k) for row in rows)
    return write_rows(_FORMAT.having(had), cells, **form.footer, dtype=storage)


def read_partition(data: bytes, chosen: Sequence[int] | None = None) -> list[PartitionRow]:
    """Read a training partition, its rows in stored order or those `chosen` by number.

    Arrays are read-only views of `data`. ValueError for damaged bytes or tensors of another size
    than stated.
    """
    rows, footer = read_rows(_FORMAT, data, chosen)
    form, storage = StoredForm.stated(footer), stated_storage(footer)
    return [_from_cells(row, form, storage) for row in rows]


def read_partition_lengths(
    file: BinaryIO | io.IOBase,
) -> tuple[Int64[np.ndarray, " rows"], Int64[np.ndarray, " rows"]]:
    """Read only each row's number of 10 ms frames and its offset, in stored order."""
    # Without tensors this takes 10 ms, where a whole shard takes 150.
    return _lengths(read_columns(_FORMAT, file, _LENGTHS))


@dataclass(frozen=True, slots=True, eq=False)
class PartitionIndex:
    """PartitionIndex: what a partition's rows are without their tensors, in stored order."""

    utterance_ids: Sequence[str]
    placements: Sequence[str | None]
    durations_ms: Sequence[int]
    num_frames: Int64[np.ndarray, " rows"]
    offsets: Int64[np.ndarray, " rows"]


def read_partition_index(file: BinaryIO | io.IOBase) -> PartitionIndex:
    """Read only each row's id, placement and duration, and what `read_partition_lengths` reads."""
    names = ("utterance_id", "duration_ms", "placement")
    columns = read_columns(_FORMAT, file, (*names, *_LENGTHS))
    lengths = _lengths(columns)
    ids, durations = (columns[name].to_pylist() for name in names[:2])
    # Partitions of utterances without placement have no such column.
    placed = columns.get("placement", pa.nulls(len(ids), pa.string())).to_pylist()
    return PartitionIndex(ids, placed, durations, *lengths)


def _lengths(
    columns: Mapping[str, pa.ChunkedArray],
) -> tuple[Int64[np.ndarray, " rows"], Int64[np.ndarray, " rows"]]:
    num_frames, offsets = (columns[name].to_numpy().astype(np.int64) for name in _LENGTHS)
    if (num_frames < 0).any() or ((offsets < 0) | (offsets >= STACK)).any():
        raise ValueError("damaged shard: need num_frames >= 0 and offsets of 0, 1 or 2")
    return num_frames, offsets


def read_partition_transcripts(file: BinaryIO | io.IOBase) -> list[tuple[str, str]]:
    """Read only each row's utterance id and transcript, in stored order; "" for a row without."""
    columns = read_columns(_FORMAT, file, ("utterance_id", "text"))
    ids, texts = (columns[name].to_pylist() for name in ("utterance_id", "text"))
    return [(utterance_id, text or "") for utterance_id, text in zip(ids, texts, strict=True)]


def read_partition_speakers(file: BinaryIO | io.IOBase) -> list[str]:
    """Read only each row's speaker, in stored order."""
    speakers: list[str] = read_columns(_FORMAT, file, ("speaker_id",))["speaker_id"].to_pylist()
    return speakers


def read_partition_provenance(
    file: BinaryIO | io.IOBase,
) -> tuple[list[str], list[str], Float64[np.ndarray, " rows"]]:
    """Read only each row's utterance, speaker and mean log Z of soft targets, in stored order.

    The mean log Z measures how unsure the teacher was; rows without soft targets have 0.
    """
    columns = read_columns(_FORMAT, file, ("utterance_id", "speaker_id", "log_z"))
    utterances, speakers = (columns[name].to_pylist() for name in ("utterance_id", "speaker_id"))
    log_z = (np.frombuffer(cell or b"", FLOAT16) for cell in columns["log_z"].to_pylist())
    means = [float(each.mean(dtype=np.float64)) if each.size else 0.0 for each in log_z]
    return utterances, speakers, np.array(means, np.float64)


def _to_cells(row: PartitionRow, k: int) -> Row:
    where, num_frames = row.utterance_id, len(row.features)
    cells: Row = {
        "utterance_id": where,
        "speaker_id": row.speaker_id,
        "duration_ms": row.duration_ms,
        "text": row.text,
        "num_frames": num_frames,
        "features": features_to_cell(row.features, row.storage, where),
        "offset": row.offset,
        "placement": row.placement,
    }
    if isinstance(row.targets, Alignment):
        # An alignment at 100 Hz serves all three offsets.
        senones = to_bytes(row.targets.senones, UINT16, (num_frames,), f"{where} alignment")
        return cells | {"alignment": senones}
    num_targets = num_stored_rows(num_frames, row.offset, offsets_of(row.targets))
    return cells | kbest_to_cells(stored_rows(row.targets), num_targets, k, where)


def _from_cells(cells: dict[str, Any], form: StoredForm, storage: Storage) -> PartitionRow:
    where, num_frames = cells["utterance_id"], cells["num_frames"]
    return PartitionRow(
        where,
        cells["speaker_id"],
        cells["duration_ms"],
        cells["text"],
        features_from_cell(cells["features"], num_frames, storage, where),
        _targets_from_cells(cells, form),
        cells["offset"],
        storage,
        cells.get("placement"),
    )


def _targets_from_cells(cells: dict[str, Any], form: StoredForm) -> Alignment | StoredKBest:
    where, num_frames = cells["utterance_id"], cells["num_frames"]
    is_aligned = cells["alignment"] is not None
    is_soft = any(cells[name] is not None for name in ("senones", "logits", "log_z"))
    if is_aligned == is_soft:
        kinds = "both an alignment and" if is_soft else "neither an alignment nor"
        raise ValueError(f"damaged shard: {where} has {kinds} k-best targets: need one of them")
    if is_soft:
        shape = num_stored_rows(num_frames, cells["offset"], form.offsets), form.k
        kbest = kbest_from_cells(cells, shape, form.tail_samples, where)
        return from_stored_rows(kbest, form.offsets)
    return Alignment(from_buffer(cells["alignment"], UINT16, (num_frames,), f"{where} alignment"))
