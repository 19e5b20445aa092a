"""List the objects of a manifest, tell what they hold, and divide them into tasks' pieces."""

import csv
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from infra.store.object_store import ObjectInfo, ObjectStore, join_uri, normalize_uri

PIECE_BYTES = 64 * 2**20
"""A piece of JSON lines or Parquet has so many bytes, or one row group."""

LISTS_PER_PIECE = 64
"""A piece has so many small lists, such as LibriSpeech's transcripts of a chapter."""

JSON_LINES, DELIMITED, PARQUET = "JSON lines", "a table of text", "Parquet"
"""What a manifest's object may hold."""

_MARKS = re.compile(r"_SUCCESS|\..*|.*_\$folder\$")
_AUDIO = "an audio file", "name a manifest that lists it"
_MAGIC = {
    b"fLaC": _AUDIO,
    b"RIFF": _AUDIO,
    b"OggS": _AUDIO,
    b"ID3": _AUDIO,
    b"PK\x03\x04": ("a zip archive", "unpack it"),
    b"\xff\xfe": ("UTF-16", "write it as UTF-8"),
    b"\xfe\xff": ("UTF-16", "write it as UTF-8"),
}
_GZIP = b"\x1f\x8b"
_TABLE = re.compile(r"\.[ct]sv(\.gz)?$")
"""The name of a table, which may have a single column, and so no delimiter."""

_HEAD_BYTES = 64 * 2**10


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


def whole(objects: Sequence[ObjectInfo], folder: str) -> Piece:
    """Make one piece of whole objects."""
    return Piece(tuple(o.uri for o in objects), tuple(o.etag for o in objects), folder)


def list_objects(store: ObjectStore, uri: str, suffixes: Sequence[str]) -> list[ObjectInfo]:
    """List a manifest's objects: itself, or those of the folder; ValueError if there are none."""
    found = [each for each in store.list(uri) if not _MARKS.fullmatch(each.uri.rpartition("/")[2])]
    if not found:
        return [store.head(uri)]
    named = [each for each in found if each.uri.endswith(tuple(suffixes))]
    if not named:
        raise ValueError(f"{uri} holds none of {', '.join('*' + each for each in suffixes)}")
    return named


def files_of(
    store: ObjectStore, uri: str, names: Sequence[str], optional: Sequence[str]
) -> list[ObjectInfo]:
    """Describe the files of a folder by name; ValueError for one that is missing."""
    there = files_in(store, uri)
    for name in names:
        if name not in there:
            raise ValueError(f"{join_uri(uri, name)}: missing; need {', '.join(names)}")
    return [there[name] for name in (*names, *optional) if name in there]


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


def split_row_groups(store: ObjectStore, found: ObjectInfo, folder: str) -> Iterator[Piece]:
    """Divide Parquet by row groups; ValueError for an object that is none."""
    try:
        with store.open(found.uri) as file:
            metadata = pq.ParquetFile(pa.PythonFile(file, mode="r")).metadata
            sizes = [metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups)]
    except (pa.ArrowException, OSError) as error:
        said = " ".join(str(error).split())[:200]
        raise ValueError(f"{found.uri}: no Parquet: {said}") from error
    start, num_bytes = 0, 0
    for number, size in enumerate(sizes):
        if number > start and num_bytes + size > PIECE_BYTES:
            yield Piece((found.uri,), (found.etag,), folder, start, number)
            start, num_bytes = number, 0
        num_bytes += size
    yield Piece((found.uri,), (found.etag,), folder, start, len(sizes))


def in_groups(
    objects: Sequence[ObjectInfo], folder: str, is_with: Callable[[ObjectInfo], bool]
) -> Iterator[Piece]:
    """Put small lists together, and leave out objects that are no lists."""
    lists = [each for each in objects if is_with(each)]
    for start in range(0, len(lists), LISTS_PER_PIECE):
        yield whole(lists[start : start + LISTS_PER_PIECE], folder)


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
    return _content_of(_unpacked(head), is_table=_TABLE.search(uri) is not None)


def _unpacked(head: bytes) -> bytes:
    if not head.startswith(_GZIP):
        return head
    with suppress(zlib.error):  # the reader names it
        return zlib.decompressobj(31).decompress(head, _HEAD_BYTES)
    return b""


def _content_of(data: bytes, *, is_table: bool) -> Content | None:
    for magic, (called, remedy) in _MAGIC.items():
        if data.startswith(magic):
            return Content(called, remedy)
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
