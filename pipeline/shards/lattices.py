"""The lattice shard: competing senone sequences of labelled utterances (003 VII-C3).

A row names its utterance's row in the training partition, which holds features and alignment. All
numbers of a lattice are packed together by zstd, and unpack to at most MAX_RATIO times their size,
so that no row exhausts memory.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from jaxtyping import Bool, Float32, Int32, Int64, Integer, Shaped, UInt16

from pipeline.filterbank import FRAME_SHIFT_MS, STACK
from pipeline.settings import LATTICE_OFFSET
from pipeline.shards.container import (
    FLOAT32,
    Format,
    Row,
    read_columns,
    read_rows,
    required,
    write_rows,
)

MAX_RATIO = 64
_PLAIN, _ZSTD = b"\0", b"\1"
_WIDTHS = (1, 2, 4)
# Of AN4's lattices, level 3 makes 14 % more bytes; an utterance takes 1.5 ms at 19.
_CODEC = pa.Codec("zstd", compression_level=19)


def pack(raw: bytes) -> bytes:
    """Pack bytes; those that zstd does not shrink, or shrinks more than a reader allows, stay."""
    packed: bytes = _CODEC.compress(raw, asbytes=True)
    is_smaller = len(packed) < len(raw) <= MAX_RATIO * len(packed)
    return _ZSTD + packed if is_smaller else _PLAIN + raw


def unpack(cell: bytes, num_bytes: int, where: str) -> bytes:
    """Unpack exactly `num_bytes`; ValueError for a cell that holds others, or too many."""
    kind, body = cell[:1], cell[1:]
    if kind == _PLAIN and len(body) == num_bytes:
        return body
    if kind != _ZSTD or not 0 <= num_bytes <= MAX_RATIO * len(body):
        raise ValueError(f"{where}: {len(cell)} packed bytes: need {num_bytes} in them")
    try:
        found: bytes = _CODEC.decompress(body, num_bytes, asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{where}: {len(cell)} packed bytes: {error}") from error
    return found


def byte_planes(values: Shaped[np.ndarray, " values"]) -> bytes:
    """Return the first bytes of all values, then the second bytes, and so on."""
    return values.view(np.uint8).reshape(len(values), values.itemsize).T.tobytes()


def from_byte_planes(raw: bytes, dtype: np.dtype) -> Shaped[np.ndarray, " values"]:
    """Return the values of these planes."""
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    return planes.T.copy().view(dtype)[:, 0]


def least_width(values: Integer[np.ndarray, " values"], where: str) -> int:
    """Return the bytes of the largest number; ValueError unless all are from 0 to 2^32 - 1."""
    least, most = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if least < 0 or most >= 1 << 32:
        raise ValueError(f"{where}: {least}..{most}: need 0..{(1 << 32) - 1}")
    return next(each for each in _WIDTHS if most < 1 << (8 * each))


_NUM_COLUMNS = 5
_FORMAT = Format(
    pa.schema(
        [
            required("utterance_id", pa.string()),
            required("duration_ms", pa.int64()),
            required("row", pa.int32()),
            required("num_levels", pa.int32()),
            required("num_states", pa.int32()),
            required("num_arcs", pa.int32()),
            required("num_costs", pa.int32()),  # that are not 0
            required("packed", pa.binary()),
        ]
    ),
    {
        "shard": "lattices",
        "frame_shift_ms": str(STACK * FRAME_SHIFT_MS),
        "offset": str(LATTICE_OFFSET),
    },
)


@dataclass(frozen=True, slots=True, eq=False)
class Lattice:
    """Lattice holds competing senone sequences of one utterance, and their graph costs.

    States are numbered level by level, from the start, alone in level 0, to the end, alone in the
    last. `level_frames` counts the low-rate frames read before each level. Arcs are sorted by
    source and lead to later levels; label s + 1 reads a frame as senone s, label 0 reads none.
    """

    level_sizes: Int32[np.ndarray, " levels"]
    level_frames: Int32[np.ndarray, " levels"]
    sources: Int32[np.ndarray, " arcs"]
    targets: Int32[np.ndarray, " arcs"]
    labels: UInt16[np.ndarray, " arcs"]
    graph_costs: Float32[np.ndarray, " arcs"]

    @property
    def num_frames(self) -> int:
        """Return the number of low-rate frames that every path reads."""
        return int(self.level_frames[-1])

    @property
    def num_states(self) -> int:
        """Return the number of states."""
        return int(self.level_sizes.sum())

    @property
    def state_levels(self) -> Int64[np.ndarray, " states"]:
        """Return the level of each state."""
        return np.repeat(np.arange(len(self.level_sizes)), self.level_sizes)


@dataclass(frozen=True, slots=True, eq=False)
class LatticeRow:
    """LatticeRow: the lattice of the utterance in row `row` of a training partition."""

    utterance_id: str
    duration_ms: int
    row: int
    lattice: Lattice


def write_lattices(rows: Sequence[LatticeRow]) -> bytes:
    """Write a lattice shard; its rows are in the order of the training partition."""
    _require_order([row.row for row in rows])
    return write_rows(_FORMAT, map(_to_cells, rows))


def read_lattices(data: bytes, chosen: Sequence[int] | None = None) -> list[LatticeRow]:
    """Read a lattice shard in stored order, or its rows `chosen` by number.

    ValueError for damaged bytes and broken lattices.
    """
    cells, _ = read_rows(_FORMAT, data, chosen)
    rows = [_from_cells(row) for row in cells]
    numbers = [row.row for row in rows]
    # Rows that are chosen come in the order of the choice.
    _require_order(numbers if chosen is None else sorted(numbers))
    return rows


def read_lattice_rows(file: BinaryIO | io.IOBase) -> Int64[np.ndarray, " lattices"]:
    """Read only the numbers of the training partition's rows that have lattices."""
    column = read_columns(_FORMAT, file, ("row",))["row"]
    rows: Int64[np.ndarray, " lattices"] = column.to_numpy().astype(np.int64)
    _require_order(rows.tolist())
    return rows


def check_lattice(lattice: Lattice, where: str) -> None:
    """Raise ValueError unless every arc is on a path from the start to the end."""
    sizes, frames = lattice.level_sizes, lattice.level_frames
    sources, targets, labels = lattice.sources, lattice.targets, lattice.labels
    num_states = int(sizes.sum(dtype=np.int64))
    _require(len(sizes) > 1 and sizes.min() > 0, where, "levels of one state or more")
    _require(sizes[0] == sizes[-1] == 1 and frames[0] == 0, where, "one start and one end")
    _require((np.diff(frames) >= 0).all(), where, "frames that ascend with the levels")
    _require(num_states <= 2 * len(sources), where, "no more states than its arcs have ends")
    ends = np.concatenate([sources, targets])
    _require(ends.min() >= 0 and ends.max() < num_states, where, "states that the levels number")
    _require((np.diff(sources) >= 0).all(), where, "arcs sorted by source")
    level = lattice.state_levels
    _require((level[sources] < level[targets]).all(), where, "arcs to later levels")
    passed = frames[level[targets]] - frames[level[sources]]
    _require((passed == (labels > 0)).all(), where, "a frame for each label, none for 0")
    everywhere = np.arange(num_states)
    _require(np.array_equal(np.unique(sources), everywhere[:-1]), where, "ways on from all states")
    _require(np.array_equal(np.unique(targets), everywhere[1:]), where, "ways to all states")
    _require(bool(np.isfinite(lattice.graph_costs).all()), where, "finite graph costs")


def _require(holds: bool | np.bool_, where: str, need: str) -> None:
    if not holds:
        raise ValueError(f"{where}: a broken lattice: need {need}")


def _require_order(rows: list[int]) -> None:
    for before, row in zip([-1, *rows], rows, strict=False):
        if row <= before:
            raise ValueError(
                f"lattices: row {row} after row {before}: need each row of the training partition "
                "once, in order, from 0: remove the lattices' folder and decode again"
            )


def _to_cells(row: LatticeRow) -> Row:
    where, lattice = row.utterance_id, row.lattice
    check_lattice(lattice, where)
    counted = {
        "level_sizes": lattice.level_sizes,
        "level_steps": np.diff(lattice.level_frames, prepend=0),
        "degrees": np.bincount(lattice.sources, minlength=lattice.num_states),
        "targets": _target_codes(lattice.targets),
        "labels": _without_repeated(lattice),
    }
    widths, raw = b"", b""
    for name, values in counted.items():
        width = least_width(values, f"{where} {name}")
        widths += bytes([width])
        raw += byte_planes(values.astype(f"<u{width}"))
    costs = lattice.graph_costs.astype(FLOAT32)
    has_cost = costs != 0
    # Equal costs recur as a whole: planes of them would take twice the bytes in raw lattices.
    raw += np.packbits(has_cost).tobytes() + costs[has_cost].tobytes()
    return {
        "utterance_id": where,
        "duration_ms": row.duration_ms,
        "row": row.row,
        "num_levels": len(lattice.level_sizes),
        "num_states": lattice.num_states,
        "num_arcs": len(lattice.sources),
        "num_costs": int(has_cost.sum()),
        "packed": widths + pack(raw),
    }


def _from_cells(cells: dict[str, Any]) -> LatticeRow:
    where, packed = cells["utterance_id"], cells["packed"].to_pybytes()
    num_levels, num_states, num_arcs, num_costs = counts = tuple(
        cells[name] for name in ("num_levels", "num_states", "num_arcs", "num_costs")
    )
    widths, body = packed[:_NUM_COLUMNS], packed[_NUM_COLUMNS:]
    if len(widths) < _NUM_COLUMNS or not {*widths} <= {*_WIDTHS}:
        raise ValueError(f"{where}: numbers of {[*widths]} bytes: need each one of {_WIDTHS}")
    _require(min(counts) >= 0, where, "counts from 0 on")
    lengths = (num_levels, num_levels, num_states, num_arcs, num_arcs)
    sizes = [count * width for count, width in zip(lengths, widths, strict=True)]
    sizes += [(num_arcs + 7) // 8, num_costs * FLOAT32.itemsize]
    raw = unpack(body, sum(sizes), where)
    *counted, flags, nonzero = (
        raw[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)
    )
    level_sizes, level_steps, degrees, codes, labels = (
        from_byte_planes(each, np.dtype(f"<u{width}")).astype(np.int64)
        for each, width in zip(counted, widths, strict=True)
    )
    _require(int(level_sizes.sum()) == num_states, where, f"{num_states} states in its levels")
    _require(int(degrees.sum()) == num_arcs, where, f"{num_arcs} arcs that leave its states")
    _require(bool((level_steps <= 1).all()), where, "a frame or none between levels")
    _require(bool((labels < 1 << 16).all()), where, "labels below 65536")
    sources, targets = np.repeat(np.arange(num_states), degrees), _targets(codes)
    is_later = (sources < targets) & (targets < num_states)
    _require(bool(is_later.all()), where, "arcs to later states that the levels number")
    costs, has_cost = (
        np.zeros(num_arcs, FLOAT32),
        np.unpackbits(np.frombuffer(flags, np.uint8), count=num_arcs).astype(bool),
    )
    _require(int(has_cost.sum()) == num_costs, where, f"{num_costs} costs that are not 0")
    costs[has_cost] = np.frombuffer(nonzero, FLOAT32)
    level_frames = np.cumsum(level_steps)
    state_frames = np.repeat(level_frames, level_sizes)
    reads = state_frames[targets] > state_frames[sources]
    lattice = Lattice(
        level_sizes=level_sizes.astype(np.int32),
        level_frames=level_frames.astype(np.int32),
        sources=sources.astype(np.int32),
        targets=targets.astype(np.int32),
        labels=_with_repeated(labels, reads, sources, targets, num_states).astype(np.uint16),
        graph_costs=costs,
    )
    check_lattice(lattice, where)
    return LatticeRow(where, cells["duration_ms"], cells["row"], lattice)


def _target_codes(targets: Integer[np.ndarray, " arcs"]) -> Int64[np.ndarray, " arcs"]:
    """Count how far each target is below the next new state: 0 for that state itself.

    States above it, which are rare, have odd codes.
    """
    next_new = np.maximum.accumulate(np.append(0, targets))[:-1].astype(np.int64) + 1
    below = next_new - targets
    codes: Int64[np.ndarray, " arcs"] = np.where(below >= 0, 2 * below, -2 * below - 1)
    return codes


def _targets(codes: Int64[np.ndarray, " arcs"]) -> Int64[np.ndarray, " arcs"]:
    """Return the targets that have these codes."""
    below = np.where(codes % 2 == 0, codes // 2, -(codes // 2) - 1)
    num_new = np.maximum(1 - below, 0)
    next_new = np.cumsum(num_new) - num_new + 1
    targets: Int64[np.ndarray, " arcs"] = next_new - below
    return targets


def _arcs_before(
    sources: Integer[np.ndarray, " arcs"], targets: Integer[np.ndarray, " arcs"], num_states: int
) -> Int64[np.ndarray, " arcs"]:
    """Return the first arc into each arc's source; -1 for arcs that leave the start."""
    entering = np.full(num_states, -1)
    entering[targets[::-1]] = np.arange(len(targets))[::-1]
    before: Int64[np.ndarray, " arcs"] = entering[sources]
    return before


def _without_repeated(lattice: Lattice) -> UInt16[np.ndarray, " arcs"]:
    """Return the labels, with 0 for each that the arc before it has too: most senones last."""
    before = _arcs_before(lattice.sources, lattice.targets, lattice.num_states)
    repeats = (before >= 0) & (lattice.labels == lattice.labels[before])
    labels: UInt16[np.ndarray, " arcs"] = np.where(repeats, np.uint16(0), lattice.labels)
    return labels


def _with_repeated(
    labels: Int64[np.ndarray, " arcs"],
    reads: Bool[np.ndarray, " arcs"],
    sources: Int64[np.ndarray, " arcs"],
    targets: Int64[np.ndarray, " arcs"],
    num_states: int,
) -> Int64[np.ndarray, " arcs"]:
    """Give an arc that reads a frame, and has no label, that of the nearest arc before with one.

    Arcs lead to later states, so the chains of arcs end.
    """
    before = _arcs_before(sources, targets, num_states)
    origins = np.where(reads & (labels == 0) & (before >= 0), before, np.arange(len(labels)))
    while not np.array_equal(origins, further := origins[origins]):
        origins = further
    found: Int64[np.ndarray, " arcs"] = labels[origins]
    return found
