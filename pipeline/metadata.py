"""The text of a metadata object, line by line: utterances, and rows for the quarantine ledger."""

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from typing import cast

from pipeline.records import (
    MAX_LINE_BYTES,
    MetadataError,
    Quarantined,
    Utterance,
    parse_line,
)


def read_records(data: bytes, uri: str) -> Iterator[tuple[int, Utterance | Quarantined]]:
    """Each line's number of bytes, and what it parses to; blank lines are no records.

    ValueError names an object that is not the gzip that it claims to be.
    """
    lines = _unpacked_lines(data, uri) if uri.endswith(".gz") else _lines(io.BytesIO(data))
    for number, line in enumerate(lines):
        content = line.removeprefix(codecs.BOM_UTF8).strip() if number == 0 else line.strip()
        if not content and len(line) <= MAX_LINE_BYTES:
            continue
        num_bytes = len(content) or len(line)
        try:
            yield num_bytes, parse_line(content)
        except MetadataError as error:
            yield num_bytes, Quarantined.from_error(error, num_bytes)


def _lines(file: io.BufferedIOBase) -> Iterator[bytes]:
    # Zeros without a line's end shrink to a thousandth: what is too long is not kept whole.
    while line := file.readline(MAX_LINE_BYTES + 1):
        yield line
        while line and not line.endswith(b"\n"):
            line = file.readline(MAX_LINE_BYTES)


def _unpacked_lines(data: bytes, uri: str) -> Iterator[bytes]:
    # Unpacked as it is read: such lines shrink to a tenth, and a task's memory is bounded.
    if not data:
        raise ValueError(f"{uri}: no whole gzip file: it has 0 bytes; write it again")
    packed = gzip.GzipFile(fileobj=io.BytesIO(data))
    try:
        yield from _lines(io.BufferedReader(cast(io.RawIOBase, packed), 2**20))
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{uri}: no whole gzip file: {error}; write it again") from error
