"""Read some rows of a manifest before any task does, and say why none of them can be used."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from urllib.parse import unquote

from infra.settings import ConfigurationError, printable, shown
from infra.store.object_store import ObjectDenied, ObjectNotFound, ObjectStore, StoreError, join_uri
from infra.store.uris import is_absolute, is_s3
from pipeline.records import Quarantined, Utterance
from pipeline.runs.names import OUTSIDE_PREFIXES, UNLABELLED
from pipeline.steps.ingestion import COLUMNS, FORMATS, reader_of
from pipeline.steps.ingestion.ingest_manifests import Manifest
from pipeline.steps.ingestion.manifest_format import Look, ManifestFormat
from pipeline.steps.ingestion.manifest_records import RecordRules, records_of, with_audio
from pipeline.steps.ingestion.manifest_rows import (
    CSV_SUFFIXES,
    DELIMITED,
    JSON_LINES,
    JSON_SUFFIXES,
    PARQUET,
    PARQUET_SUFFIXES,
    UNKNOWN_FIELD,
    Piece,
    Row,
    content_of,
)
from pipeline.steps.ingestion.tables import TARRED

PROBED_OBJECTS = 16
PROBED_ROWS = frozenset({0, *(2**power for power in range(13))})
"""Rows of an object by number: neighbours may be of one speaker, whose audio is lost."""

MAX_PROBES = 40
"""An absent object of S3 costs four requests."""

VALUE_FAULTS = frozenset(("malformed_json", "malformed_csv", "bad_duration", "bad_timestamp"))
"""Reasons of rows that are faulty by themselves: ledger rows and the loss budget tell of them."""

_LISTED = 10_000
_FORMATS = [reader_of(name) for name in FORMATS]
_LOOKS = tuple(chain.from_iterable(each.looks for each in _FORMATS))
_SUFFIXES = {JSON_LINES: JSON_SUFFIXES, DELIMITED: CSV_SUFFIXES, PARQUET: PARQUET_SUFFIXES}


def require_usable_rows(
    store: ObjectStore, manifest_store: ObjectStore, manifest: Manifest, rules: RecordRules
) -> None:
    """Raise ConfigurationError if no row that is tried of a manifest becomes a record with audio.

    It names the format that the manifest looks like, the column that is absent, or where audio
    was looked for. A single good row is enough: ledgers tell of the others. Durations are not read.
    A first row with an unknown field is refused alone, since what one row has, most have.
    """
    if TARRED.file.fullmatch(manifest.uri):
        raise _looks_like(manifest.uri, TARRED)
    faults: list[str] = []
    first_uri, is_empty = manifest.uri, True
    for piece in _first_pieces(manifest_store, manifest):
        if len(faults) == MAX_PROBES:
            break
        keys = _require_content(manifest_store, manifest, piece.uri)
        probed = _ProbedObject(store, manifest, piece, keys)
        rows = islice(manifest.format.rows(manifest_store, piece), max(PROBED_ROWS) + 1)
        for row in (row for number, row in enumerate(rows) if number in PROBED_ROWS):
            is_empty = False
            if not faults and isinstance(row, Quarantined) and row.reason == UNKNOWN_FIELD:
                _require_columns(manifest, piece.uri, keys)
                raise ConfigurationError(f"{piece.uri}: {row.detail}{probed.of_tars}")
            record = probed.record_of(row, rules)
            if isinstance(record, Quarantined) and record.reason in VALUE_FAULTS:
                continue
            if (fault := probed.fault_of(row, record)) is None:
                return
            first_uri = first_uri if faults else piece.uri
            faults.append(fault)
            if len(faults) == MAX_PROBES:
                break
    if is_empty:
        raise ConfigurationError(f"{manifest.uri}: no row: name a manifest that lists audio")
    if not faults:
        return
    tried = "its row" if len(faults) == 1 else f"none of {len(faults)} rows that were tried"
    can = "cannot" if len(faults) == 1 else "can"
    raise ConfigurationError(f"{first_uri}: {tried} {can} be used: {faults[0]}")


def _first_pieces(store: ObjectStore, manifest: Manifest) -> list[Piece]:
    """Return the first piece of each of the first objects; name the format of another's folder."""
    found: dict[str, Piece] = {}
    try:
        for piece in islice(manifest.format.pieces(store, manifest.uri), 4 * PROBED_OBJECTS):
            found.setdefault(piece.uri, piece)
            if len(found) == PROBED_OBJECTS:
                break
    except (ValueError, ObjectNotFound) as error:
        if (look := _look_of_names(store, manifest)) is not None:
            raise _looks_like(manifest.uri, look) from error
        raise
    return list(found.values())


def _look_of_names(store: ObjectStore, manifest: Manifest) -> Look | None:
    own = _name(manifest.uri)
    if found := next((look for look in _LOOKS if look.file.fullmatch(own)), None):
        return found
    names = {_name(each.uri) for each in islice(store.list_each(manifest.uri), _LISTED)}
    looks = [look for look in _LOOKS if any(map(look.file.fullmatch, names))]
    is_own = any(map(manifest.format.reads, looks))
    return None if is_own or not looks else looks[0]


def _name(uri: str) -> str:
    return uri.rpartition("/")[2]


def _looks_like(uri: str, look: Look) -> ConfigurationError:
    return ConfigurationError(f"{uri} looks like {look.called}: {look.remedy}")


def _require_content(store: ObjectStore, manifest: Manifest, uri: str) -> Sequence[str]:
    """Return the keys of an object's rows; ConfigurationError if the format does not read it."""
    form = manifest.format
    if not form.contents or (content := content_of(store, uri)) is None:
        return ()
    # A format that does not read such an object is no remedy.
    held = content.called if content.called in (DELIMITED, PARQUET) else JSON_LINES
    readers = [each.looks for each in _FORMATS if held in each.contents]
    looks = [look for look in chain(*readers) if look.keys and look.keys.issubset(content.keys)]
    is_own = any(map(form.reads, looks)) or (
        form.columns.get("audio_uri", "audio_uri") in content.keys
    )
    looks += [look for look in _LOOKS if look.file.fullmatch(_name(uri))]
    if looks and not is_own:
        raise _looks_like(uri, looks[0])
    if content.called not in form.contents:
        named = f" with the columns {_some(content.keys)}" if content.called == DELIMITED else ""
        need = f"need {' or '.join(form.contents)}"
        remedy = f": {content.remedy}" if content.remedy else ""
        raise ConfigurationError(f"{uri} holds {content.called}{named}: {need}{remedy}")
    by_name = (each for each, suffixes in _SUFFIXES.items() if uri.endswith(suffixes))
    if len(form.contents) > 1 and next(by_name, JSON_LINES) != content.called:
        suffixes = " or ".join(_SUFFIXES[content.called][::2])
        raise ConfigurationError(f"{uri} holds {content.called}: call it by a name in {suffixes}")
    if content.called != JSON_LINES:  # where each row may have other keys
        _require_columns(manifest, uri, content.keys)
    return content.keys


def _require_columns(manifest: Manifest, uri: str, keys: Sequence[str]) -> None:
    """Raise ConfigurationError if the columns that every manifest needs are not among the keys."""
    needed = {"audio_uri": ""}
    if manifest.subset != UNLABELLED:
        needed["text"] = f": {manifest.subset} needs it"
    for name, why in needed.items():
        column = manifest.format.columns.get(name, name)
        # A dot is between the keys of nested objects, of which the first row may have none.
        if column not in keys and "." not in column:
            found = _found(manifest.format, column, keys)
            raise ConfigurationError(f"{uri}: {column} is absent{why}{found}")


def _some(keys: Sequence[str]) -> str:
    return printable(", ".join(map(str, keys)))


def _found(form: ManifestFormat, absent: str, keys: Sequence[str]) -> str:
    """Say which columns there are where one is absent, and how to name it."""
    if not keys:
        return ""
    fields = [name for name, column in form.columns.items() if column == absent] or [absent]
    option = f"{COLUMNS} {fields[0]}=COLUMN"
    remedy = f"rename a column, or give --format table with {option}" if form.contents else ""
    remedy = f"rename a column, or give {option}" if COLUMNS in form.takes else remedy
    return f"; found {_some(keys)}: {remedy}"


@dataclass(frozen=True, slots=True)
class _ProbedObject:
    """_ProbedObject is an object of a manifest, of whose rows some are tried; they have `keys`."""

    store: ObjectStore
    manifest: Manifest
    piece: Piece
    keys: Sequence[str]

    @property
    def of_tars(self) -> str:
        """What to do with a manifest of NeMo's tars; empty for any other."""
        is_tarred = "shard_id" in self.keys
        return f"; shard_id is of {TARRED.called}: {TARRED.remedy}" if is_tarred else ""

    def record_of(self, row: Row | Quarantined, rules: RecordRules) -> Utterance | Quarantined:
        [located] = with_audio([row], self.piece.folder, self.store.allowed_prefixes)
        if isinstance(located, Row):
            # Without a duration it is read of the audio, which costs more than to see it is there.
            located = Row({"duration_s": 1.0, **located.fields}, located.num_bytes)
        columns = self.manifest.format.columns
        [record] = records_of([located], rules, self.manifest.subset, columns)
        return record

    def fault_of(self, row: Row | Quarantined, record: Utterance | Quarantined) -> str | None:
        """Say why a row is no record whose audio is there; None if it is one."""
        if isinstance(record, Quarantined):
            if isinstance(row, Row) and record.reason == OUTSIDE_PREFIXES:
                # The wrong folder is the cause, rather than the permission to read there.
                uri = _at(*self._base_and_path(row))
                if uri.startswith("/") and "/../" not in uri and not Path(uri).exists():
                    return self._absent(row, f"{uri}: no such object")
            if record.reason == "missing_field":
                absent = record.detail.partition(" ")[0]
                return f"{record.detail}{_found(self.manifest.format, absent, self.keys)}"
            return record.detail
        assert isinstance(row, Row), "a ledger row is no record"
        try:
            self.store.head(record.audio_uri)
        except ObjectDenied as error:
            return str(error)
        except ObjectNotFound as error:
            return self._absent(row, str(error))
        return None

    def _absent(self, row: Row, said: str) -> str:
        """Say where an object was looked for, and where it is if that is easily found."""
        if self.of_tars:
            return f"{said}{self.of_tars}"
        base, written = self._base_and_path(row)
        where = said if is_absolute(written) else f"{said}: {shown(written)} is relative to {base}"
        for other, need in (
            (unquote(written), "paths are read without decoding %: write"),
            (written.replace("\\", "/"), "need / in place of \\: write"),
            (written.strip(), "need no blanks around it: write"),
        ):
            if other != written and self._is_there(_at(base, other)):
                return f"{where}: {need} {shown(other)}"
        prefixes = self.store.allowed_prefixes
        parents = (str(Path(each).parent) for each in (base, *prefixes) if not is_s3(each))
        for folder in dict.fromkeys((str(Path.cwd()), *prefixes, *parents)):
            if not is_absolute(written) and self._is_there(join_uri(folder, written)):
                remedy = f"put the manifest into {folder}, or write whole paths"
                return f"{where}; it is at {join_uri(folder, written)}: {remedy}"
        return where

    def _base_and_path(self, row: Row) -> tuple[str, str]:
        return str(row.fields.get("folder", self.piece.folder)), str(row.fields["audio_uri"])

    def _is_there(self, uri: str) -> bool:
        with suppress(StoreError, OSError):
            return self.store.exists(uri) if is_s3(uri) else Path(uri).is_file()
        return False


def _at(base: str, path: str) -> str:
    return path if is_absolute(path) else join_uri(base, path)
