"""The text of a metadata object, line by line: utterances, and rows for the quarantine ledger."""

import codecs
import gzip
import io
import json
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pipeline.records import (
    MAX_LINE_BYTES,
    MAX_NAME_CHARACTERS,
    MetadataError,
    Quarantined,
    Utterance,
    parse_line,
)

MAX_UNPACKED_BYTES = 2**30
"""The most that an archive may unpack to: some four million records."""

MAX_OTHER_LINES = 2**18
"""The most blank or malformed lines an object may have beyond its number of records."""


def read_records(data: bytes, uri: str) -> Iterator[tuple[int, Utterance | Quarantined]]:
    """Each line's number of bytes, and what it parses to; blank lines are no records.

    ValueError names an object that is not the gzip that it claims to be, one that unpacks to more
    than MAX_UNPACKED_BYTES, and one with too many lines that are no records.
    """
    num_others = 0
    for number, (line, content) in enumerate(_contents(data, uri)):
        if content or len(line) > MAX_LINE_BYTES:
            num_bytes = len(content) or len(line)
            try:
                yield num_bytes, parse_line(content)
                num_others -= 1
                continue
            except MetadataError as error:
                yield num_bytes, Quarantined.from_error(error, num_bytes)
        num_others += 1
        if num_others > MAX_OTHER_LINES:
            found = f"{num_others} more lines are blank or malformed than are records"
            remedy = "write it again, one record a line"
            raise ValueError(
                f"{uri}: by line {number + 1}, {found}: need at most {MAX_OTHER_LINES}; {remedy}"
            )


def read_ids(data: bytes, uri: str) -> Iterator[str]:
    """Yield the utterance ids of `read_records` in less than half of its time; "" for none.

    A record that repeats a field is malformed and has no id there; here it may have one.
    """
    for line, content in _contents(data, uri):
        if content or len(line) > MAX_LINE_BYTES:
            if not (found := _id_of(content)):
                try:
                    found = parse_line(content).utterance_id
                except MetadataError as error:
                    found = Quarantined.from_error(error, len(content)).utterance_id
            yield found


def _id_of(content: bytes) -> str:
    """Return the id of a record that may have other faults; "" if a parser must look."""
    if len(content) > MAX_LINE_BYTES:
        return ""
    try:
        found = json.loads(content.decode())["utterance_id"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ""
    return found if isinstance(found, str) and len(found) <= MAX_NAME_CHARACTERS else ""


def _contents(data: bytes, uri: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield each line, and what is in it besides blanks and a mark of the byte order."""
    is_packed = uri.endswith(".gz")
    lines = _unpacked_lines(data, uri) if is_packed else bounded_lines(io.BytesIO(data), uri)
    for number, line in enumerate(lines):
        yield line, (line.removeprefix(codecs.BOM_UTF8) if number == 0 else line).strip()


def bounded_lines(
    file: io.BufferedIOBase, uri: str, most_bytes: int = sys.maxsize
) -> Iterator[bytes]:
    """Yield the lines of a file; of a longer one its first MAX_LINE_BYTES + 1 bytes alone.

    ValueError names the object at `uri` if it unpacks to more than `most_bytes`.
    """
    num_bytes = 0
    # Zeros without a line's end shrink to a thousandth: what is too long is not kept whole.
    while line := file.readline(MAX_LINE_BYTES + 1):
        rest, num_bytes = line, num_bytes + len(line)
        while rest and not rest.endswith(b"\n") and num_bytes <= most_bytes:
            rest = file.readline(MAX_LINE_BYTES)
            num_bytes += len(rest)
        if num_bytes > most_bytes:
            raise ValueError(
                f"{uri}: unpacks to more than {most_bytes} bytes: split it into several objects"
            )
        yield line


@contextmanager
def whole_gzip(uri: str) -> Iterator[None]:
    """Raise ValueError if the object that is unpacked within the context is no whole gzip file."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{uri}: no whole gzip file: {error}; write it again") from error


def _unpacked_lines(data: bytes, uri: str) -> Iterator[bytes]:
    # Unpacked as it is read: such lines shrink to a tenth, and a task's memory is bounded.
    if not data:
        raise ValueError(f"{uri}: no whole gzip file: it has 0 bytes; write it again")
    with whole_gzip(uri):
        unpacked: Any = gzip.GzipFile(fileobj=io.BytesIO(data))
        yield from bounded_lines(io.BufferedReader(unpacked, 2**20), uri, MAX_UNPACKED_BYTES)
