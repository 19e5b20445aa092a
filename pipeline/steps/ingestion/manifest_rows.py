"""Read the rows of manifests as they come: JSON lines, CSV and Parquet, a few in memory.

The objects of a manifest are listed, recognized by their contents, and divided into pieces, one for
each task.
"""

import csv
import difflib
import gzip
import hashlib
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, BinaryIO, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from infra.settings import printable
from infra.store.object_store import ObjectInfo, ObjectStore, normalize_uri
from pipeline.audio.codecs import is_audio
from pipeline.metadata import bounded_lines, whole_gzip
from pipeline.packing import runs_by_bytes
from pipeline.records import MAX_LINE_BYTES, MetadataError, Quarantined, without_repeats
from pipeline.shards.container import arrow_errors
from pipeline.steps.ingestion import IGNORE_COLUMNS
from pipeline.steps.selection.buckets import is_mark

PIECE_BYTES = 64 * 2**20
"""A piece of JSON lines or Parquet has so many bytes, or one row group."""

JSON_LINES, DELIMITED, PARQUET = "JSON lines", "a table of text", "Parquet"
"""What a manifest's object may hold."""

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
CSV_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
PARQUET_SUFFIXES = (".parquet",)

_MAGIC = {
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"\xff\xfe": ("UTF-16", "write it as UTF-8"),
    b"\xfe\xff": ("UTF-16", "write it as UTF-8"),
}
_GZIP = b"\x1f\x8b"
_TABLE = re.compile(r"\.[ct]sv(\.gz)?$")
"""The name of a table, which may have a single column, and so no delimiter."""

_HEAD_BYTES = 64 * 2**10
_DIGESTED_BYTES = 8 * 2**20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Content:
    """Content says what an object holds, by which keys, and what to do if that is not read."""

    called: str
    remedy: str = ""
    keys: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """Piece is one task's share of a manifest: objects whole, or from `start` to before `end`.

    Both count bytes of JSON lines, or row groups of Parquet. `etags` are those of the objects when
    they were listed, and `folder` is what relative paths are relative to.
    """

    uris: tuple[str, ...]
    etags: tuple[str, ...]
    folder: str
    start: int = 0
    end: int | None = None

    @property
    def uri(self) -> str:
        """The first object, which names the piece in messages."""
        return self.uris[0]

    def require_unchanged(self, store: ObjectStore) -> None:
        """Raise ValueError for an object that was replaced since it was listed."""
        for uri, etag in zip(self.uris, self.etags, strict=True):
            if store.head(uri).etag != etag:
                remedy = "leave the manifest as it is, and ingest it into a new --run"
                raise ValueError(f"{uri}: it changed while it was ingested: {remedy}")


def digest_object(element: tuple[ObjectStore, str]) -> str:
    """Compute an object's SHA-256, some of its bytes at a time."""
    store, uri = element
    digest = hashlib.sha256()
    with closing(store.open(uri)) as file:
        while some := file.read(_DIGESTED_BYTES):
            digest.update(some)
    return digest.hexdigest()


def whole(objects: Sequence[ObjectInfo], folder: str) -> Piece:
    """Make one piece of whole objects."""
    return Piece(tuple(o.uri for o in objects), tuple(o.etag for o in objects), folder)


def list_objects(store: ObjectStore, uri: str, suffixes: Sequence[str]) -> list[ObjectInfo]:
    """List a manifest's objects: itself, or those of the folder; ValueError if there are none."""
    found = [each for each in store.list(uri) if not is_mark(each)]
    if not found:
        return [store.head(uri)]
    named = [each for each in found if each.uri.endswith(tuple(suffixes))]
    if not named:
        raise ValueError(f"{uri} holds none of {', '.join('*' + each for each in suffixes)}")
    return named


def files_in(store: ObjectStore, uri: str) -> dict[str, ObjectInfo]:
    """Return the files of a folder by name, without those of its subfolders, such as split4/1."""
    folder = normalize_uri(uri)
    found = store.list(uri)
    return {e.uri.rpartition("/")[2]: e for e in found if folder_of_object(e.uri) == folder}


def folder_of_object(uri: str) -> str:
    """Return the folder of an object, which its relative paths are relative to."""
    return normalize_uri(uri).rpartition("/")[0]


def split_lines(found: ObjectInfo, folder: str) -> Iterator[Piece]:
    """Divide JSON lines by bytes; an archive is one piece."""
    step = max(found.num_bytes, 1) if found.uri.endswith(".gz") else PIECE_BYTES
    for start in range(0, max(found.num_bytes, 1), step):
        end = None if start + step >= found.num_bytes else start + step
        yield Piece((found.uri,), (found.etag,), folder, start, end)


def json_pieces(store: ObjectStore, uri: str) -> Iterator[Piece]:
    """Yield ranges of JSON lines, and whole archives."""
    for found in list_objects(store, uri, JSON_SUFFIXES):
        yield from split_lines(found, folder_of_object(found.uri))


def split_row_groups(store: ObjectStore, found: ObjectInfo, folder: str) -> Iterator[Piece]:
    """Divide Parquet by row groups; ValueError for an object that is none."""
    with arrow_errors(f"{found.uri}: no Parquet"), store.open(found.uri) as file:
        metadata = pq.ParquetFile(pa.PythonFile(file, mode="r")).metadata
        sizes = [metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups)]
    # Parquet without row groups is one piece, too: its columns are judged.
    for run in list(runs_by_bytes(sizes, PIECE_BYTES)) or [slice(0, 0)]:
        yield Piece((found.uri,), (found.etag,), folder, run.start, run.stop)


def content_of(store: ObjectStore, uri: str) -> Content | None:
    """Tell what an object holds by its first bytes; None if that is nothing known.

    Raises ValueError for one whose name does not say whether it is in gzip.
    """
    with closing(store.open(uri)) as file:
        head = file.read(_HEAD_BYTES)
        if head.startswith(b"PAR1"):
            with suppress(pa.ArrowException, OSError):  # the reader names it
                names = pq.ParquetFile(pa.PythonFile(file, mode="r")).schema_arrow.names
                return Content(PARQUET, "give --format table", names)
    is_named = uri.endswith(".gz")
    if head and head.startswith(_GZIP) is not is_named:
        said = "is no gzip, but its name ends in .gz" if is_named else "is in gzip"
        need = "without .gz" if is_named else "with .gz at its end"
        raise ValueError(f"{uri} {said}: call it by a name {need}")
    if head.startswith(_GZIP):
        packed, head = head, b""
        with suppress(zlib.error):  # the reader names it
            head = zlib.decompressobj(31).decompress(packed, _HEAD_BYTES)
    return _content_of(head, is_table=_TABLE.search(uri) is not None)


def _content_of(data: bytes, *, is_table: bool) -> Content | None:
    for magic, (called, remedy) in _MAGIC.items():
        if data.startswith(magic):
            return Content(called, remedy)
    if is_audio(data):
        return Content("an audio file", "name a manifest that lists it")
    text = data.decode("utf-8-sig", "replace").strip()
    lines = text.splitlines()
    for line in lines[:100]:
        if line.startswith("{") and (keys := _keys(line)):
            return Content(JSON_LINES, "give --format table", keys)
    if text.startswith(("[", "{")):
        keys = _keys(text.lstrip("[ \t\r\n"))
        called, query = ("a JSON array", ".[]") if text[0] == "[" else ("JSON over lines", ".")
        return Content(called, f"write an object a line, as jq -c '{query}' does", keys)
    delimiter = "\t" if lines and "\t" in lines[0] else ","
    if lines and (delimiter in lines[0] or is_table):
        header = next(csv.reader(lines[:1], delimiter=delimiter))
        return Content(DELIMITED, "give --format table, and --columns for other names", header)
    return Content("text") if lines else None


def _keys(text: str) -> Sequence[str]:
    try:
        found, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError):
        return ()
    return tuple(found) if isinstance(found, dict) else ()


BATCH_ROWS = 1024
UNKNOWN_FIELD = "unknown_field"
"""The reason of ledger rows with a field that is neither used nor known to be harmless."""

_READ_BYTES = 2**20
_QUOTED_FIELD = re.compile(r'"((?:[^"]|"")*)"')


@dataclass(frozen=True, slots=True)
class Row:
    """Row holds the fields of one row by the names of its manifest, and its number of bytes."""

    fields: Mapping[str, Any]
    num_bytes: int


def each_row(
    function: Callable[[Row], T], rows: Iterable[Row | Quarantined]
) -> Iterator[T | Quarantined]:
    """Yield what the function makes of each row; a MetadataError becomes a ledger row."""
    for row in rows:
        if isinstance(row, Quarantined):
            yield row
            continue
        try:
            made = function(row)
        except MetadataError as error:
            yield Quarantined.from_error(error, row.num_bytes)
        else:
            yield made


@dataclass(frozen=True, slots=True)
class KnownFields:
    """KnownFields names what a format uses, and what it may pass over without a loss.

    `ignored` are the names that the user passes over, also of what would be used.
    """

    used: Collection[str]
    harmless: Collection[str] = ()
    ignored: Collection[str] = ()

    @property
    def read(self) -> frozenset[str]:
        """The names that are used and not ignored."""
        return frozenset(self.used) - frozenset(self.ignored)

    @property
    def all(self) -> frozenset[str]:
        """The names that a row may have."""
        return frozenset((*self.used, *self.harmless, *self.ignored))

    def complaint(self, unknown: Collection[str]) -> str:
        """Say what is not known, what may be meant by it, and the remedies."""
        first, *others = sorted(unknown)
        nearest = difflib.get_close_matches(first, sorted(self.read), 1)
        meant = f" (is it {nearest[0]}?)" if nearest else ""
        more = f" and {len(others)} more fields" if others else ""
        named = printable(",".join((first, *others)), 100)
        return (
            f"{printable(first, 60)!r}{meant}{more}: not known, so not used: rename it, with "
            f"--format table name it by --columns, or pass over it: {IGNORE_COLUMNS} {named}"
        )

    def require(self, names: Collection[str], uri: str) -> None:
        """Raise ValueError for columns of a table that are not known."""
        if unknown := set(names) - self.all:
            raise ValueError(f"{uri}: {self.complaint(unknown)}")


def json_rows(
    store: ObjectStore, piece: Piece, known: KnownFields | None = None
) -> Iterator[Row | Quarantined]:
    """Yield the objects of JSON lines that begin within the piece; a blank line is no row.

    An object with a field that is not `known` is a ledger row; null is no field.
    """
    names = known.all if known else frozenset[str]()
    for line in lines_of(store, piece):
        content = line.strip()
        if not content:
            continue
        try:
            if len(line) > MAX_LINE_BYTES:
                detail = f"a line beyond {MAX_LINE_BYTES} bytes: split it"
                raise MetadataError("malformed_json", detail)
            try:
                fields = json.loads(content, object_pairs_hook=without_repeats)
            except (ValueError, RecursionError) as error:
                raise MetadataError("malformed_json", str(error)) from error
            if not isinstance(fields, dict):
                said = f"need an object, got {type(fields).__name__}"
                raise MetadataError("malformed_json", said)
            unknown = fields.keys() - names if known else ()
            if known and (named := [name for name in unknown if fields[name] is not None]):
                raise MetadataError(UNKNOWN_FIELD, known.complaint(named))
            yield Row(fields, len(content))
        except MetadataError as error:
            yield Quarantined.from_error(error, len(content))


def lines_of(store: ObjectStore, piece: Piece) -> Iterator[bytes]:
    """Yield the lines that begin within the piece; of a longer one MAX_LINE_BYTES and one more."""
    with closing(store.open(piece.uri)) as file:
        stored: Any = file
        if piece.uri.endswith(".gz"):
            with whole_gzip(piece.uri):
                unpacked = gzip.GzipFile(fileobj=stored)
                yield from bounded_lines(io.BufferedReader(unpacked, _READ_BYTES), piece.uri)
            return
        reader = io.BufferedReader(stored, _READ_BYTES)
        lines = bounded_lines(reader, piece.uri)
        if piece.start:
            # A line that begins before the piece is of the one before, which reads on to its end.
            reader.seek(piece.start - 1)
            next(lines, None)
        while piece.end is None or reader.tell() < piece.end:
            if not (line := next(lines, b"")):
                return
            yield line


Split = Callable[[str, int], list[str]]
"""Divides a line of a table into its fields; the number is that of the table's columns."""


def split_by_commas(line: str, num_columns: int) -> list[str]:
    """Divide a line of CSV; quotes may enclose a field, and are doubled within it."""
    del num_columns
    return _split_quoted(line, ",") if '"' in line else line.split(",")


def split_by_tabs(line: str, num_columns: int) -> list[str]:
    """Divide a line of TSV, which spreadsheets quote as CSV, and Common Voice does not quote.

    Quotes are letters unless they enclose a whole field. A tab is within quotes only if the line
    has too many fields otherwise. A line that ends within quotes is refused: in CSV the next would
    belong to it.
    """
    fields = line.split("\t")
    if '"' not in line:
        return fields
    if len(fields) != num_columns:
        return _split_quoted(line, "\t")
    if _leaves_open(line):
        raise MetadataError("malformed_csv", _OPEN_QUOTE)
    return [
        quoted[1].replace('""', '"') if (quoted := _QUOTED_FIELD.fullmatch(field)) else field
        for field in fields
    ]


def _leaves_open(line: str) -> bool:
    """Return whether a reader of CSV would take the next line, too."""
    reader = csv.reader([f"{line}\n", "\n"], csv.excel_tab)
    try:
        next(reader)
    except csv.Error as error:  # a field beyond 128 KiB
        raise MetadataError("malformed_csv", str(error)) from error
    return reader.line_num > 1


def split_unquoted(line: str, num_columns: int) -> list[str]:
    """Divide a line of tabs, where quotes are letters."""
    del num_columns
    return line.split("\t")


_OPEN_QUOTE = (
    "a quote that is not closed on its line: a row is one line; write quotes within a field twice, "
    "and enclose the field in quotes"
)


def _split_quoted(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line], delimiter=delimiter, strict=True))
    except csv.Error as error:
        is_open = "end of data" in str(error)
        raise MetadataError("malformed_csv", _OPEN_QUOTE if is_open else str(error)) from error


def csv_rows(
    store: ObjectStore, uri: str, split: Split, known: KnownFields
) -> Iterator[Row | Quarantined]:
    """Yield the rows of a table whose first line names its columns.

    A row is one line, which CR, LF or both end, and an empty line is none: so each line is a row or
    one of the ledger, whatever quotes are in it. ValueError for columns that are not known.
    """
    with closing(store.open(uri)) as file:
        lines = _text_lines(file, uri)
        first = next(lines, None)
        if first is None:
            return
        names = _column_names(f"{uri}:{first[0]}", first[1], split)
        known.require([name for name in names if name], uri)
        read = known.read
        for number, line in lines:
            try:
                if len(line) > MAX_LINE_BYTES:
                    detail = f"beyond {MAX_LINE_BYTES} characters: split it"
                    raise MetadataError("malformed_csv", detail)
                yield _csv_row(names, split(line, len(names)), read)
            except MetadataError as error:
                detail = f"line {number}: {error.detail}"
                yield Quarantined("", "", error.reason, detail, len(line), 0)


def _text_lines(file: BinaryIO | io.IOBase, uri: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty, without what ends them, and their numbers."""
    stored: Any = file
    unpacked: Any = gzip.GzipFile(fileobj=stored) if uri.endswith(".gz") else stored
    # A byte that is not UTF-8 becomes half a surrogate, which a record's check refuses.
    text = io.TextIOWrapper(unpacked, encoding="utf-8-sig", errors="surrogateescape", newline="")
    number = 0
    with whole_gzip(uri):
        while line := text.readline(MAX_LINE_BYTES + 1):
            number += 1
            content = line.rstrip("\r\n")
            rest = line
            while rest and not rest.endswith(("\r", "\n")):
                rest = text.readline(_READ_BYTES)
            if content:
                yield number, content


def _column_names(where: str, line: str, split: Split) -> list[str]:
    """Read the line that names the columns; ValueError for one that cannot name them."""
    if any(each == "\0" or "\ud800" <= each <= "\udfff" for each in line):
        raise ValueError(f"{where}: the columns' names are not UTF-8: convert the table")
    try:
        names = split(line, 0)
    except MetadataError as error:
        raise ValueError(f"{where}: the columns' names: {error.detail}") from error
    _require_once(names, where)
    return names


def _require_once(names: Sequence[str], where: str) -> None:
    counts = Counter(filter(None, names))
    if repeated := next((name for name, count in counts.items() if count > 1), None):
        raise ValueError(f"{where}: column {printable(repeated, 80)!r} twice: rename one")


def _csv_row(names: Sequence[str], fields: Sequence[str], read: Collection[str]) -> Row:
    if len(fields) != len(names):
        detail = f"{len(fields)} fields, and the first line names {len(names)} columns"
        raise MetadataError("malformed_csv", detail)
    pairs = list(zip(names, fields, strict=True))
    # Only the first column may be without a name: of row numbers, as pandas writes them.
    if any(field and not name for name, field in pairs[1:]):
        raise MetadataError("malformed_csv", "a field in a column without a name: name the column")
    found = {name: field for name, field in pairs if field and name in read}
    return Row(found, sum(map(len, fields)))


def parquet_rows(store: ObjectStore, piece: Piece, known: KnownFields) -> Iterator[Row]:
    """Yield the rows of the piece's row groups; ValueError for columns that are not known."""
    said = f"{piece.uri}: damaged Parquet"
    with arrow_errors(said), closing(store.open(piece.uri)) as file:
        source = pa.PythonFile(file, mode="r")
        table = pq.ParquetFile(source, coerce_int96_timestamp_unit="us")
        stored = table.schema_arrow.names
        _require_once(stored, piece.uri)
        known.require(stored, piece.uri)
        if not (columns := [name for name in stored if name in known.read]):
            raise ValueError(f"{piece.uri}: none of its columns is used: see --columns")
        schema = table.metadata.schema
        # Spark's and Hive's old times are instants, though no zone is stored.
        leaves = (schema.column(number) for number in range(len(schema)))
        instants = {each.name for each in leaves if each.physical_type == "INT96"}
        groups = range(piece.start, piece.end or table.num_row_groups)
        for batch in table.iter_batches(BATCH_ROWS, row_groups=groups, columns=columns):
            names = batch.schema.names
            cells = [_values(batch.column(n), name in instants) for n, name in enumerate(names)]
            for row in zip(*cells, strict=True):
                pairs = zip(names, row, strict=True)
                fields = {name: _plain(value) for name, value in pairs if value is not None}
                yield Row(fields, sum(len(str(value)) for value in fields.values()))


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


def _plain(value: object) -> object:
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return value.isoformat() if isinstance(value, date | datetime) else value
