"""What a format of manifests is: how it is known, which objects it has, and its rows as our fields.

A format is a file beside this one, with a subclass of `ManifestFormat`, and a row of the package's
table.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from infra.store.object_store import ObjectStore
from pipeline.records import MEMBER_FIELDS, PRED_TEXT, SEGMENT_FIELDS, Quarantined
from pipeline.steps.ingestion import IGNORE_COLUMNS
from pipeline.steps.ingestion.manifest_rows import Piece, Row, each_row

FIELDS = (
    *("utterance_id", "speaker_id", "duration_s", "created_at", "locale", "audio_uri"),
    *("text", "placement", "stream", *SEGMENT_FIELDS, *MEMBER_FIELDS),
    *("hypotheses", PRED_TEXT, "score"),
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
    "score": float,
    "member_offset": int,
    "member_bytes": int,
}
_NAMES = ("utterance_id", "speaker_id", "stream")


@dataclass(frozen=True, slots=True)
class Look:
    """Look says by what a manifest of a format is known, for messages of other formats' readers.

    Rows of a manifest that is `called` so have all of `keys`, or the name of one of its objects
    matches `file`; `remedy` says what to give instead. One that is not `read` is of the same tool.
    """

    called: str
    remedy: str
    keys: frozenset[str] = frozenset()
    file: re.Pattern[str] = re.compile(r"(?!)")
    is_read: bool = True


@dataclass(frozen=True, slots=True)
class FormatOptions:
    """FormatOptions are what a user says of manifests beside their format.

    `columns` are the manifest's names of our fields, where they are others, and columns that are
    `ignored` are passed over. `recordings_uri` is where recordings of supervisions are.
    """

    columns: Mapping[str, str] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()
    recordings_uri: str = ""


NO_OPTIONS = FormatOptions()


@dataclass(frozen=True, slots=True)
class ManifestFormat(ABC):
    """ManifestFormat divides a manifest into pieces, and reads their rows as our fields.

    `contents` are what its objects may hold; formats of folders name none. `takes` are the options
    that mean something to it, and `names` its own names of our fields. A format that
    `names_channels` reads which channel is spoken in.
    """

    options: FormatOptions = NO_OPTIONS

    looks: ClassVar[Sequence[Look]] = ()
    contents: ClassVar[Sequence[str]] = ()
    takes: ClassVar[Collection[str]] = (IGNORE_COLUMNS,)
    names: ClassVar[Mapping[str, str]] = {}
    names_channels: ClassVar[bool] = False

    @property
    def columns(self) -> Mapping[str, str]:
        """The manifest's names of our fields, where they are others."""
        return {**self.names, **self.options.columns}

    def prefixes(self, uri: str) -> tuple[str, ...]:
        """Return what may be read beside the audio, for the manifest at `uri`."""
        return (uri,)

    def reads(self, look: Look) -> bool:
        """Return whether a manifest that looks so is of this format."""
        return look.is_read and look in self.looks

    @abstractmethod
    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield the pieces of the manifest at `uri`."""

    @abstractmethod
    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield the rows of a piece, with the fields that a metadata record has."""


def renamed_rows(
    rows: Iterator[Row | Quarantined], columns: Mapping[str, str], ignored: Collection[str]
) -> Iterator[Row | Quarantined]:
    """Yield the rows by the names of our fields, without the columns that are ignored."""
    read = {name: column for name, column in columns.items() if column not in ignored}
    return each_row(lambda row: renamed(row, read), rows)


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
    name = str(named) if isinstance(named, str | int) else ""
    return Quarantined(name, uri, "bad_field", detail, row.num_bytes, 0)
