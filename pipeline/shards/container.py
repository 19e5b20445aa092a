"""Write rows as the bytes of a Parquet file, and read them; refuse bytes that break the format.

Files are uncompressed and plainly encoded, so that a file cannot unpack to more than its size.
Arrays are cells of raw little-endian bytes of a stated shape.
"""

import hashlib
import io
import math
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.kbest import KBest, check_kbest

ROW_GROUP_ROWS = 128
ROW_GROUP_BYTES = 32 * 2**20
"""A row group ends with the row that fills either: Arrow holds a whole one, several times."""
_TAIL_BYTES = 8
_DIGEST_BYTES = 32
_UNREADABLE = "cannot read the shard"
_ARROW_SCHEMA_KEY = b"ARROW:schema"

T = TypeVar("T")
Row = dict[str, Any]
"""Values by column; a cell of a required binary column may be a contiguous array."""
Columns = dict[str, list[Any]]


@dataclass(frozen=True, slots=True)
class Format:
    """The columns of one kind of shard and the footer entries that state its conventions.

    A shard may have some `optional` columns after the others.
    """

    schema: pa.Schema
    footer: Mapping[str, str]
    optional: tuple[pa.Field, ...] = ()

    def having(self, names: Collection[str]) -> "Format":
        """Return the format of shards that have these of the optional columns."""
        more = [field for field in self.optional if field.name in names]
        return replace(self, schema=pa.schema([*self.schema, *more]), optional=())


def required(name: str, data_type: pa.DataType) -> pa.Field:
    """Describe a column without nulls."""
    return pa.field(name, data_type, nullable=False)


def write_rows(shard_format: Format, rows: Iterable[Row], **entries: str) -> bytes:
    """Write `rows`, with more footer `entries`; the same rows always give the same bytes.

    Rows may be made one by one: beside the result, one row group of them is in memory.
    """
    schema = shard_format.schema.with_metadata({**shard_format.footer, **entries})
    options = {
        "compression": "none",
        "use_dictionary": False,
        "write_statistics": False,  # they would repeat whole tensors as minimum and maximum
        "write_page_checksum": True,
    }
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema, **options) as writer:
        for group in _row_groups(_with_unique_ids(rows)):
            columns = [_column(field, [row.get(field.name) for row in group]) for field in schema]
            writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=schema))
    return seal(sink)


def _column(field: pa.Field, cells: list[Any]) -> pa.Array:
    if field.nullable or not pa.types.is_binary(field.type):
        return pa.array(cells, field.type)
    # Arrays as they are, copied once; pyarrow takes bytes alone, and copies those again.
    offsets = pa.array(np.cumsum([0, *map(_num_bytes, cells)]), pa.int32())
    data = pa.py_buffer(b"".join(cells))
    return pa.Array.from_buffers(field.type, len(cells), [None, offsets.buffers()[1], data])


def _num_bytes(cell: object) -> int:
    if isinstance(cell, np.ndarray):
        return cell.nbytes
    return len(cell) if isinstance(cell, bytes) else 0


def seal(file: io.BytesIO) -> bytes:
    """Put the SHA-256 of a Parquet file's footer before that footer, where readers skip it.

    Parquet has checksums for pages only, and pyarrow 26 aborts on some damaged footers.
    """
    with file.getbuffer() as data:
        footer_start = len(data) - _TAIL_BYTES - int.from_bytes(data[-8:-4], "little")
        footer = bytes(data[footer_start:])
    file.seek(footer_start)
    file.write(hashlib.sha256(footer).digest() + footer)
    return file.getvalue()  # the file's own memory, no copy


def read_rows(
    shard_format: Format, data: bytes, chosen: Sequence[int] | None = None
) -> tuple[list[Row], dict[str, str]]:
    """Read all rows or those `chosen` by number, and the footer's entries.

    Binary cells are buffers. ValueError for bytes that are damaged or of another format.
    """
    with arrow_errors(_UNREADABLE):
        file = _open(shard_format, pa.BufferReader(data))
        wanted = None if chosen is None else frozenset(chosen)
        rows = list(_with_unique_ids(_stored_rows(file, wanted)))
        return rows if chosen is None else [rows[number] for number in chosen], _footer(file)


def read_columns(
    shard_format: Format, file: BinaryIO | io.IOBase, names: Sequence[str]
) -> dict[str, pa.ChunkedArray]:
    """Read only the columns `names` through a seekable file, of optional ones those it has."""
    with arrow_errors(_UNREADABLE):
        parquet = _open(shard_format, pa.PythonFile(file, mode="r"))
        found = [name for name in names if name in parquet.schema_arrow.names]
        table = parquet.read(found, use_threads=False)
        return {name: table.column(name) for name in found}


def read_plain_columns(
    shard: BinaryIO | io.IOBase | bytes, names: Sequence[str]
) -> tuple[Columns, dict[str, str]]:
    """Read those of the columns `names` that a shard of any format has, and its footer's entries.

    Tensors are not read. ValueError for bytes that are no shard.
    """
    with arrow_errors(_UNREADABLE):
        in_memory = isinstance(shard, bytes)
        source = pa.BufferReader(shard) if in_memory else pa.PythonFile(shard, mode="r")
        file = _open_sealed(source)
        if "utterance_id" not in file.schema_arrow.names:
            raise ValueError("cannot read the shard: it has no utterance_id")
        known = [name for name in names if name in file.schema_arrow.names]
        table = file.read(known, use_threads=False)
        return {name: table.column(name).to_pylist() for name in known}, _footer(file)


def read_first_rows(file: BinaryIO | io.IOBase, count: int) -> tuple[pq.FileMetaData, pa.Table]:
    """Read what a shard of any format says of itself, and its first rows, with their columns.

    ValueError for bytes that are no shard.
    """
    with arrow_errors(_UNREADABLE):
        parquet = _open_sealed(pa.PythonFile(file, mode="r"))
        batch = next(parquet.iter_batches(count), None)
        rows = [] if batch is None else [batch.slice(0, count)]
        return parquet.metadata, pa.Table.from_batches(rows, parquet.schema_arrow)


@contextmanager
def arrow_errors(said: str) -> Iterator[None]:
    """Raise ValueError, which says so and why, for what Arrow cannot read within the context."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError) as error:
        why = " ".join(str(error).split())  # Thrift's errors have several lines
        raise ValueError(f"{said}: {why[:200]}") from error


def _require_seal(source: pa.NativeFile) -> None:
    num_bytes = source.size()
    if num_bytes < _TAIL_BYTES + _DIGEST_BYTES:
        raise ValueError(f"cannot read the shard: {num_bytes} bytes are none")
    tail = source.read_at(_TAIL_BYTES, num_bytes - _TAIL_BYTES)
    footer_bytes = int.from_bytes(tail[:4], "little") + _TAIL_BYTES
    digest_start = num_bytes - footer_bytes - _DIGEST_BYTES
    if digest_start < 0 or not tail.endswith(b"PAR1"):
        raise ValueError("cannot read the shard: its end is no Parquet footer's")
    sealed = source.read_at(footer_bytes + _DIGEST_BYTES, digest_start)
    if hashlib.sha256(sealed[_DIGEST_BYTES:]).digest() != sealed[:_DIGEST_BYTES]:
        raise ValueError("cannot read the shard: its footer does not match its digest")


def _open(shard_format: Format, source: pa.NativeFile) -> pq.ParquetFile:
    file = _open_sealed(source)
    columns, names = file.schema_arrow, shard_format.schema.names
    if not columns.equals(shard_format.having(columns.names).schema):
        found = f"columns {columns.names}: need {names}, with their types"
        raise ValueError(f"{found}: read it by the version that wrote it")
    footer = _footer(file)
    for name, expected in shard_format.footer.items():
        if footer.get(name) != expected:
            raise ValueError(f"footer entry {name} = {footer.get(name)!r}: need {expected!r}")
    return file


def _open_sealed(source: pa.NativeFile) -> pq.ParquetFile:
    _require_seal(source)
    file = pq.ParquetFile(source, page_checksum_verification=True)
    _require_plain(file.metadata, source.size())
    return file


_PLAIN = {"PLAIN", "RLE"}
"""The encodings of values, and of what says which of them are null."""


def _require_plain(metadata: pq.FileMetaData, num_bytes: int) -> None:
    chunks = [
        metadata.row_group(group).column(column)
        for group in range(metadata.num_row_groups)
        for column in range(metadata.num_columns)
    ]
    for chunk in chunks:
        # Deltas of bytes name a prefix of the value before: 2 MB may be 120 of text.
        packed = chunk.compression != "UNCOMPRESSED" or not set(chunk.encodings) <= _PLAIN
        if packed or chunk.has_dictionary_page or not 0 <= chunk.num_values <= num_bytes:
            where = f"column {chunk.path_in_schema}"
            raise ValueError(
                f"{where}: need plain, uncompressed values, fewer than the file's bytes"
            )


def _footer(file: pq.ParquetFile) -> dict[str, str]:
    entries = file.metadata.metadata or {}
    return {
        key.decode(): value.decode() for key, value in entries.items() if key != _ARROW_SCHEMA_KEY
    }


def _stored_rows(file: pq.ParquetFile, wanted: Container[int] | None) -> Iterator[Row]:
    """Yield rows in stored order; of those that are not wanted only their ids."""
    first = 0
    for group in range(file.num_row_groups):
        table = file.read_row_group(group, use_threads=False)
        ids = table.column("utterance_id").to_pylist()
        numbers = [row for row in range(len(ids)) if wanted is None or first + row in wanted]
        columns = [_cells(table.column(name), numbers) for name in table.column_names]
        whole = (
            dict(zip(table.column_names, cells, strict=True))
            for cells in zip(*columns, strict=True)
        )
        found = dict(zip(numbers, whole, strict=True))
        yield from (found.get(row, {"utterance_id": ids[row]}) for row in range(len(ids)))
        first += len(ids)


def _cells(column: pa.ChunkedArray, numbers: list[int]) -> list[Any]:
    if pa.types.is_binary(column.type):
        return [column[number].as_buffer() for number in numbers]
    cells: list[Any] = column.take(pa.array(numbers, pa.int64())).to_pylist()
    return cells


def _row_groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    group: list[Row] = []
    num_bytes = 0
    for row in rows:
        group.append(row)
        num_bytes += sum(map(_num_bytes, row.values()))
        if len(group) == ROW_GROUP_ROWS or num_bytes >= ROW_GROUP_BYTES:
            yield group
            group, num_bytes = [], 0
    if group:
        yield group


def _with_unique_ids(rows: Iterable[Row]) -> Iterator[Row]:
    seen: set[str] = set()
    for row in rows:
        utterance_id = row["utterance_id"]
        if utterance_id in seen:
            raise ValueError(f"utterance {utterance_id!r} twice: a shard holds each once")
        seen.add(utterance_id)
        yield row


def common(name: str, values: Iterable[T], default: T) -> T:
    """Return what all rows of a shard have; ValueError for rows that differ."""
    found = set(values)
    if len(found) > 1:
        raise ValueError(f"{name} = {sorted(found, key=str)}: need one for the whole shard")
    return found.pop() if found else default


FLOAT16 = np.dtype("<f2")
FLOAT32 = np.dtype("<f4")
UINT16 = np.dtype("<u2")
UINT8 = np.dtype("u1")


def from_buffer(
    cell: pa.Buffer | None, dtype: np.dtype[Any], shape: tuple[int, ...], where: str
) -> np.ndarray:
    """View `cell` as an array; ValueError unless it has exactly the bytes of `shape`."""
    num_bytes = 0 if cell is None else cell.size
    expected = math.prod(shape) * dtype.itemsize
    if cell is None or min(shape) < 0 or num_bytes != expected:
        raise ValueError(f"{where}: {num_bytes} bytes: need {expected}, shape {shape} of {dtype}")
    return np.frombuffer(cell, dtype).reshape(shape)


def to_bytes(array: np.ndarray, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> bytes:
    """Give the raw bytes of `array`; ValueError if it has another type or shape."""
    require_tensor(array, dtype, shape, where)
    return array.tobytes()  # no memoryview: pyarrow 26 never releases those


def require_tensor(
    array: np.ndarray, dtype: np.dtype[Any], shape: tuple[int, ...], where: str
) -> None:
    """Raise ValueError if `array` has another type or shape."""
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{where}: {array.dtype} {array.shape}: need {dtype} {shape}")


def kbest_from_cells(
    row: dict[str, Any], shape: tuple[int, int], tail_samples: int, where: str
) -> KBest:
    """View the cells senones, logits and log_z of `row` as k-best targets, checked.

    The last `tail_samples` of the `shape`'s columns were drawn.
    """
    kbest = KBest(
        from_buffer(row["senones"], UINT16, shape, f"{where} senones"),
        from_buffer(row["logits"], FLOAT16, shape, f"{where} logits"),
        from_buffer(row["log_z"], FLOAT16, shape[:1], f"{where} log_z"),
        tail_samples=tail_samples,
    )
    check_kbest(kbest, where)
    return kbest


def kbest_to_cells(kbest: KBest, num_frames: int, k: int, where: str) -> dict[str, bytes]:
    """Give the cells senones, logits and log_z of k-best targets, checked."""
    cells = {
        "senones": to_bytes(kbest.senones, UINT16, (num_frames, k), f"{where} senones"),
        "logits": to_bytes(kbest.logits, FLOAT16, (num_frames, k), f"{where} logits"),
        "log_z": to_bytes(kbest.log_z, FLOAT16, (num_frames,), f"{where} log_z"),
    }
    check_kbest(kbest, where)
    return cells
