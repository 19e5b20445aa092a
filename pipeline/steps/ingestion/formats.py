"""The formats of manifests: which objects they have, and how their rows become our fields."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

from infra.store.object_store import ObjectStore
from pipeline.records import (
    MEMBER_FIELDS,
    SEGMENT_FIELDS,
    MetadataError,
    PartialRecord,
    Quarantined,
)
from pipeline.steps.ingestion.manifest_rows import (
    DELIMITED,
    JSON_LINES,
    PARQUET,
    KnownFields,
    Piece,
    Row,
    csv_rows,
    folder_of_object,
    json_rows,
    list_objects,
    parquet_rows,
    split_by_commas,
    split_by_tabs,
    split_lines,
    split_row_groups,
    whole,
)

JSON_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
CSV_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
PARQUET_SUFFIXES = (".parquet",)

FIELDS = (
    *("utterance_id", "speaker_id", "duration_s", "created_at", "locale", "audio_uri"),
    *("text", "placement", "stream", *SEGMENT_FIELDS, *MEMBER_FIELDS),
)
"""The fields of a metadata record."""

CHANNEL = "channel"
"""What some manifests name beside a record's fields: the channel of the audio that is spoken in."""

ABOUT_SPEAKERS = ("gender", "sex", "age", "accent", "accents", "variant")
ABOUT_TEXTS = ("up_votes", "down_votes", "sentence_id", "sentence_domain", "segment")
"""Of Common Voice, whose segment is the name of a benchmark."""

ABOUT_FILES = ("sample_rate", "sampling_rate", "num_samples", "num_frames")
ROW_NUMBERS = ("__index_level_0__", "Unnamed: 0")
"""The row numbers that pandas writes; in CSV their column may have no name."""

HARMLESS = (*ABOUT_SPEAKERS, *ABOUT_TEXTS, *ABOUT_FILES, *ROW_NUMBERS)
"""What tables and NeMo's manifests may have without a change to audio, transcript or speaker."""

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
    """Table reads JSON lines, CSV or Parquet; `columns` names the column of some of our fields.

    Columns that are `ignored` are passed over.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    ignored: Collection[str] = ()

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
        columns = {name: self.columns.get(name, name) for name in (*FIELDS, CHANNEL)}
        known = KnownFields(columns.values(), HARMLESS, self.ignored)
        rows: Iterator[Row | Quarantined]
        if piece.uri.endswith(PARQUET_SUFFIXES):
            rows = parquet_rows(store, piece, known)
        elif piece.uri.endswith(CSV_SUFFIXES):
            is_tabbed = ".tsv" in piece.uri.rpartition("/")[2]
            rows = csv_rows(
                store, piece.uri, split_by_tabs if is_tabbed else split_by_commas, known
            )
        else:
            rows = json_rows(store, piece, known)
        return renamed_rows(rows, columns, self.ignored)


NEMO_COLUMNS = {
    "audio_uri": "audio_filepath",
    "duration_s": "duration",
    "start_s": "offset",
    "text": "text",
    "utterance_id": "utterance_id",
    "speaker_id": "speaker",
    "locale": "lang",
    "created_at": "created_at",
    CHANNEL: "channel_selector",
}
NEMO_HARMLESS = (
    *HARMLESS,
    *("pred_text", "wer", "cer", "score", "confidence", "taskname", "task", "source_lang"),
    *("target_lang", "pnc", "itn", "timestamp", "diarize", "prompt_format", "decodercontext"),
    *("num_segments", "num_speakers", "label", "answer", "context", "question", "emotion"),
    *("text_pc", "text_no_preprocessing", "normalized_text", "orig_sr", "seq_label"),
    *("rttm_filepath", "uem_filepath", "ctm_filepath"),
)
"""What NeMo's tools add to a manifest: hypotheses, prompts, labels, and files of other tasks."""


@dataclass(frozen=True, slots=True)
class Nemo:
    """Nemo reads NeMo's JSON lines: audio_filepath, duration, text, offset, and some others.

    Keys that are `ignored` are passed over.
    """

    ignored: Collection[str] = ()

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
        known = KnownFields(NEMO_COLUMNS.values(), NEMO_HARMLESS, self.ignored)
        return renamed_rows(json_rows(store, piece, known), NEMO_COLUMNS, self.ignored)


def renamed_rows(
    rows: Iterator[Row | Quarantined], columns: Mapping[str, str], ignored: Collection[str]
) -> Iterator[Row | Quarantined]:
    """Yield the rows by the names of our fields, without the columns that are ignored."""
    read = {name: column for name, column in columns.items() if column not in ignored}
    return (row if isinstance(row, Quarantined) else renamed(row, read) for row in rows)


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
    partial = PartialRecord(str(named) if isinstance(named, str | int) else "", uri)
    return Quarantined.from_error(MetadataError("bad_field", detail, partial), row.num_bytes)
