"""List the objects of a manifest, and divide them into pieces, each of which one task reads."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from infra.store.object_store import ObjectInfo, ObjectStore, join_uri, normalize_uri

PIECE_BYTES = 64 * 2**20
"""A piece of JSON lines or Parquet has so many bytes, or one row group."""

LISTS_PER_PIECE = 64
"""A piece has so many small lists, such as LibriSpeech's transcripts of a chapter."""

_MARKS = re.compile(r"_SUCCESS|\..*|.*_\$folder\$")


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
