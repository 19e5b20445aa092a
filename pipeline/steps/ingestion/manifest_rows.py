"""Read the rows of manifests as they come: JSON lines, CSV and Parquet, a few in memory."""

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from infra.store.object_store import ObjectStore
from pipeline.records import MAX_LINE_BYTES, MetadataError, Quarantined
from pipeline.steps.ingestion.manifest_objects import Piece

BATCH_ROWS = 1024
_READ_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Row:
    """Row holds the fields of one row by the names of its manifest, and its number of bytes."""

    fields: Mapping[str, Any]
    num_bytes: int


def json_rows(store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
    """Yield the objects of JSON lines that begin within the piece; a blank line is no row."""
    for line in _lines_of(store, piece):
        content = line.strip()
        if not content:
            continue
        try:
            if len(line) > MAX_LINE_BYTES:
                detail = f"a line beyond {MAX_LINE_BYTES} bytes: split it"
                raise MetadataError("malformed_json", detail)
            yield Row(_json_object(content), len(content))
        except MetadataError as error:
            yield Quarantined.from_error(error, len(content))


def _json_object(content: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise MetadataError("malformed_json", str(error)) from error
    if not isinstance(fields, dict):
        raise MetadataError("malformed_json", f"need an object, got {type(fields).__name__}")
    return fields


def _lines_of(store: ObjectStore, piece: Piece) -> Iterator[bytes]:
    with closing(store.open(piece.uri)) as file:
        if piece.uri.endswith(".gz"):
            yield from _unpacked(file, piece.uri)
            return
        reader: io.BufferedIOBase = io.BufferedReader(_Raw(file), _READ_BYTES)
        if piece.start:
            # A line that begins before the piece is of the one before, which reads on to its end.
            reader.seek(piece.start - 1)
            _skip_line(reader)
        while piece.end is None or reader.tell() < piece.end:
            if not (line := _next_line(reader)):
                return
            yield line


class _Raw(io.RawIOBase):
    """_Raw lets a buffer read another file in blocks of its own."""

    def __init__(self, file: Any) -> None:  # noqa: ANN401 - S3's files lack some of BinaryIO
        self._file = file

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """Return the place."""
        return int(self._file.tell())

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Read some bytes."""
        some = self._file.read(len(buffer))
        buffer[: len(some)] = some
        return len(some)


def _unpacked(file: Any, uri: str) -> Iterator[bytes]:  # noqa: ANN401
    try:
        reader: io.BufferedIOBase = io.BufferedReader(gzip.GzipFile(fileobj=file), _READ_BYTES)
        while line := _next_line(reader):
            yield line
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{uri}: no whole gzip file: {error}; write it again") from error


def _next_line(reader: io.BufferedIOBase) -> bytes:
    # What is too long is not kept whole: one byte more than allowed says that it is.
    line = reader.readline(MAX_LINE_BYTES + 1)
    if len(line) > MAX_LINE_BYTES and not line.endswith(b"\n"):
        _skip_line(reader)
    return line


def _skip_line(reader: io.BufferedIOBase) -> None:
    while (rest := reader.readline(_READ_BYTES)) and not rest.endswith(b"\n"):
        pass


def csv_rows(
    store: ObjectStore, uri: str, dialect: type[csv.Dialect] = csv.excel
) -> Iterator[Row | Quarantined]:
    """Yield the rows of a table whose first line names its columns."""
    with closing(store.open(uri)) as file:
        unpacked: Any = gzip.GzipFile(fileobj=file) if uri.endswith(".gz") else file
        # A byte that is not UTF-8 becomes half a surrogate, which a record's check refuses.
        text = io.TextIOWrapper(
            unpacked, encoding="utf-8-sig", errors="surrogateescape", newline=""
        )
        rows = csv.DictReader(text, dialect=dialect)
        while True:
            try:
                fields = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                yield Quarantined("", "", "malformed_csv", f"row {rows.line_num}: {error}", 0, 0)
                continue
            except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                raise ValueError(f"{uri}: no whole gzip file: {error}; write it again") from error
            yield _csv_row(fields, rows.line_num)


def _csv_row(fields: Mapping[str | None, Any], number: int) -> Row | Quarantined:
    num_bytes = sum(len(each or "") for each in fields.values())
    if None in fields or None in fields.values():
        detail = f"row {number}: another number of fields than the first line names"
        return Quarantined("", "", "malformed_csv", detail, num_bytes, 0)
    return Row({str(name): value for name, value in fields.items() if value}, num_bytes)


def parquet_rows(store: ObjectStore, piece: Piece, columns: list[str]) -> Iterator[Row]:
    """Yield the rows of the piece's row groups; of the `columns` those that the object has."""
    try:
        with closing(store.open(piece.uri)) as file:
            source = pa.PythonFile(file, mode="r")
            table = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
            known = [name for name in columns if name in table.schema_arrow.names]
            instants = _int96_columns(table)
            groups = range(piece.start, piece.end or table.num_row_groups)
            for batch in table.iter_batches(BATCH_ROWS, row_groups=groups, columns=known):
                if not known:  # rows without any field, so that each is counted
                    yield from (Row({}, 0) for _ in range(batch.num_rows))
                    continue
                names = batch.schema.names
                cells = [_values(batch.column(n), name in instants) for n, name in enumerate(names)]
                for row in zip(*cells, strict=True):
                    yield _parquet_row(dict(zip(names, row, strict=True)))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"{piece.uri}: damaged Parquet: {said}") from error


def _int96_columns(table: pq.ParquetFile) -> set[str]:
    """Return the columns of Spark's and Hive's old times: instants, though no zone is stored."""
    schema = table.metadata.schema
    fields = (schema.column(number) for number in range(len(schema)))
    return {each.name for each in fields if each.physical_type == "INT96"}


def _values(column: pa.Array, is_instant: bool) -> list[Any]:
    """Return a column's values as Python's; one that Python has no value for is text."""
    if is_instant:
        column = column.cast(pa.timestamp("us", "UTC"))
    elif pa.types.is_timestamp(column.type) and column.type.unit == "ns":
        # Python's times have microseconds, and a single nanosecond would end the step.
        column = column.cast(pa.timestamp("us", column.type.tz), safe=False)
    try:
        return list(column.to_pylist())
    except (ValueError, OverflowError):  # a year beyond 9999, for one
        return [_value(each) for each in column]


def _value(cell: pa.Scalar) -> object:
    try:
        return cell.as_py()
    except (ValueError, OverflowError):
        return f"a {cell.type} that is no time of the calendar"


def _parquet_row(fields: Mapping[str, Any]) -> Row:
    plain = {name: _plain(value) for name, value in fields.items() if value is not None}
    return Row(plain, sum(len(str(value)) for value in plain.values()))


def _plain(value: object) -> object:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, date | datetime) else value
