"""The formats of manifests: which objects they have, and how their rows become our fields."""

import csv
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from infra.store.object_store import ObjectStore
from pipeline.audio_parts import MEMBER_FIELDS, SEGMENT_FIELDS
from pipeline.records import MetadataError, PartialRecord, Quarantined
from pipeline.steps.ingestion.manifest_objects import (
    DELIMITED,
    JSON_LINES,
    PARQUET,
    Piece,
    folder_of_object,
    list_objects,
    split_lines,
    split_row_groups,
    whole,
)
from pipeline.steps.ingestion.manifest_rows import Row, csv_rows, json_rows, parquet_rows

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
CSV_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
PARQUET_SUFFIXES = (".parquet",)

FIELDS = (
    *("utterance_id", "speaker_id", "duration_s", "created_at", "locale", "audio_uri"),
    *("text", "placement", "stream", *SEGMENT_FIELDS, *MEMBER_FIELDS),
)
"""The fields of a metadata record."""

_NUMBERS: Mapping[str, type[float] | type[int]] = {
    "duration_s": float,
    "start_s": float,
    "member_offset": int,
    "member_bytes": int,
}
_NAMES = ("utterance_id", "speaker_id", "stream")


@dataclass(frozen=True, slots=True)
class Look:
    """Look says by what a manifest of a format is known, for messages of other formats' readers.

    Rows of a manifest that is `called` so have all of `keys`, or the name of one of its objects
    matches `file`; `remedy` says what to give instead.
    """

    called: str
    remedy: str
    keys: frozenset[str] = frozenset()
    file: re.Pattern[str] = re.compile(r"(?!)")

    def has_keys(self, keys: Collection[str]) -> bool:
        """Return whether a row with these keys is of the format."""
        return bool(self.keys) and self.keys.issubset(keys)


TARRED = Look(
    "NeMo's tarred data set",
    "its members are not read: unpack the tars, and give a manifest of the files",
    frozenset({"tarred_audio_filepaths"}),
    re.compile(r".*_OP_\d+\.\.\d+_CL_.*"),
)


@runtime_checkable
class ManifestFormat(Protocol):
    """ManifestFormat divides a manifest into pieces, and reads their rows as our fields.

    The formats of a class share its `looks`. `contents` are what its objects may hold; formats of
    folders name none.
    """

    looks: ClassVar[Sequence[Look]]
    contents: ClassVar[Sequence[str]]

    @property
    def columns(self) -> Mapping[str, str]:
        """The manifest's names of our fields, where they are others."""
        ...

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield the pieces of the manifest at `uri`."""
        ...

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield the rows of a piece, with the fields that a metadata record has."""
        ...


@dataclass(frozen=True, slots=True)
class Table:
    """Table reads JSON lines, CSV or Parquet; `columns` names the column of some of our fields."""

    columns: Mapping[str, str] = field(default_factory=dict)

    looks: ClassVar[Sequence[Look]] = ()
    contents: ClassVar[Sequence[str]] = (JSON_LINES, DELIMITED, PARQUET)

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield ranges of JSON lines and of row groups, and whole CSVs."""
        for found in list_objects(store, uri, (*JSON_SUFFIXES, *CSV_SUFFIXES, *PARQUET_SUFFIXES)):
            folder = folder_of_object(found.uri)
            if found.uri.endswith(PARQUET_SUFFIXES):
                yield from split_row_groups(store, found, folder)
            elif found.uri.endswith(CSV_SUFFIXES):
                yield whole([found], folder)
            else:
                yield from split_lines(found, folder)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield the rows, each field from its column."""
        columns = {name: self.columns.get(name, name) for name in FIELDS}
        rows: Iterator[Row | Quarantined]
        if piece.uri.endswith(PARQUET_SUFFIXES):
            rows = parquet_rows(store, piece, list(columns.values()))
        elif piece.uri.endswith(CSV_SUFFIXES):
            is_tabbed = ".tsv" in piece.uri.rpartition("/")[2]
            rows = csv_rows(store, piece.uri, csv.excel_tab if is_tabbed else csv.excel)
        else:
            rows = json_rows(store, piece)
        return (row if isinstance(row, Quarantined) else renamed(row, columns) for row in rows)


NEMO_COLUMNS = {
    "audio_uri": "audio_filepath",
    "duration_s": "duration",
    "start_s": "offset",
    "text": "text",
    "utterance_id": "utterance_id",
    "speaker_id": "speaker",
    "locale": "lang",
    "created_at": "created_at",
}


@dataclass(frozen=True, slots=True)
class Nemo:
    """Nemo reads NeMo's JSON lines: audio_filepath, duration, text, offset, and some others."""

    columns: ClassVar[Mapping[str, str]] = NEMO_COLUMNS
    looks: ClassVar[Sequence[Look]] = (
        Look("NeMo's", "give --format nemo", frozenset({"audio_filepath"})),
    )
    contents: ClassVar[Sequence[str]] = (JSON_LINES,)

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield ranges of JSON lines."""
        for found in list_objects(store, uri, JSON_SUFFIXES):
            yield from split_lines(found, folder_of_object(found.uri))

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield the rows; with an offset, also of 0, the utterance is a segment."""
        for row in json_rows(store, piece):
            yield row if isinstance(row, Quarantined) else renamed(row, NEMO_COLUMNS)


def renamed(row: Row, columns: Mapping[str, str]) -> Row:
    """Return the row by the names of our fields; numbers in text become numbers."""
    fields = {
        name: _value(name, row.fields[column])
        for name, column in columns.items()
        if row.fields.get(column) is not None
    }
    return Row(fields, row.num_bytes)


def _value(name: str, value: object) -> object:
    if name in _NUMBERS and isinstance(value, str):
        try:
            return _NUMBERS[name](value)
        except ValueError:
            return value  # the record's check names it
    # Speakers are numbers in some manifests.
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if name in _NAMES and is_number else value


def refused(row: Row, uri: str, detail: str) -> Quarantined:
    """Make the ledger row of a manifest's row that says what cannot be read."""
    named = row.fields.get("id")
    partial = PartialRecord(named if isinstance(named, str) else "", uri)
    return Quarantined.from_error(MetadataError("bad_field", detail, partial), row.num_bytes)


class _WithoutQuotes(csv.excel_tab):
    """_WithoutQuotes has tabs between columns, and quotes are letters."""

    quoting = csv.QUOTE_NONE


def common_voice_rows(store: ObjectStore, uri: str) -> Iterator[Row | Quarantined]:
    """Yield the rows of a table of Common Voice."""
    return csv_rows(store, uri, _WithoutQuotes)


def by_name(names: Sequence[str], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return some of a row's values."""
    return {name: row[name] for name in names if row.get(name) is not None}
