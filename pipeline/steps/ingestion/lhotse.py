"""Read lhotse's manifests: cuts, supervisions with their recordings, and Shar's tars."""

import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, ClassVar

from infra.ranges import shown
from infra.store.object_store import ObjectInfo, ObjectStore
from pipeline.records import Quarantined
from pipeline.steps.ingestion.formats import JSON_SUFFIXES, Look, by_name, refused
from pipeline.steps.ingestion.manifest_objects import (
    JSON_LINES,
    Piece,
    folder_of_object,
    list_objects,
    split_lines,
    whole,
)
from pipeline.steps.ingestion.manifest_rows import Row, json_rows

JOINED_ROWS = 20_000
"""So many supervisions are in memory while their recordings are looked up."""

_WITHOUT_AUDIO = (".json", ".nodata", ".nometa")
_COLUMNS = {
    "audio_uri": "recording.sources.source",
    "utterance_id": "id",
    "duration_s": "duration",
    "start_s": "start",
    "text": "supervisions.text",
    "speaker_id": "supervisions.speaker",
    "locale": "supervisions.language",
}
CUTS = (
    Look(
        "lhotse's cuts",
        "give --format lhotse, or --format shar for the folder that SharWriter wrote",
        frozenset({"id", "start", "duration", "channel", "supervisions"}),
    ),
    Look("lhotse's mixtures of cuts", "give --format lhotse", frozenset({"id", "tracks"})),
)
SUPERVISIONS = Look(
    "lhotse's supervisions",
    "give --format lhotse, and their recordings by --recordings URI",
    frozenset({"id", "recording_id", "start", "duration"}),
)
RECORDINGS = Look(
    "lhotse's recordings, which say of no utterance",
    "give cuts by --format lhotse, or supervisions with --recordings URI",
    frozenset({"id", "sources", "sampling_rate"}),
)


class _RefusedError(Exception):
    """_RefusedError says why a row is no utterance of one recording."""


@dataclass(frozen=True, slots=True)
class LhotseCuts:
    """LhotseCuts reads MonoCuts, each of one file's audio; a mixture is a ledger row."""

    columns: ClassVar[Mapping[str, str]] = _COLUMNS
    looks: ClassVar[Sequence[Look]] = CUTS
    contents: ClassVar[Sequence[str]] = (JSON_LINES,)

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield ranges of JSON lines, and whole archives."""
        for found in list_objects(store, uri, JSON_SUFFIXES):
            yield from split_lines(found, folder_of_object(found.uri))

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield each cut as a segment, or as the whole object if it is the whole recording."""
        for row in json_rows(store, piece):
            yield row if isinstance(row, Quarantined) else _accepted(row, piece.uri, _cut_fields)


@dataclass(frozen=True, slots=True)
class LhotseSupervisions:
    """LhotseSupervisions joins supervisions with the recordings at another URI, by recording_id."""

    recordings_uri: str

    columns: ClassVar[Mapping[str, str]] = _COLUMNS
    looks: ClassVar[Sequence[Look]] = (SUPERVISIONS,)
    contents: ClassVar[Sequence[str]] = (JSON_LINES,)

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield ranges of the supervisions' lines."""
        return LhotseCuts().pieces(store, uri)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield each supervision as a segment of its recording.

        A batch of supervisions is joined by one pass over the recordings.
        """
        batch: list[Row | Quarantined] = []
        for row in json_rows(store, piece):
            batch.append(row)
            if len(batch) == JOINED_ROWS:
                yield from self._joined(store, batch, piece)
                batch = []
        yield from self._joined(store, batch, piece)

    def _joined(
        self, store: ObjectStore, batch: Sequence[Row | Quarantined], piece: Piece
    ) -> Iterator[Row | Quarantined]:
        wanted = {
            str(row.fields.get("recording_id")) for row in batch if not isinstance(row, Quarantined)
        }
        recordings = self._recordings(store, wanted) if wanted else {}
        for row in batch:
            if isinstance(row, Quarantined):
                yield row
                continue
            recording = recordings.get(str(row.fields.get("recording_id")))
            supervised = {**row.fields, "supervisions": [row.fields], "recording": recording}
            yield _accepted(Row(supervised, row.num_bytes), piece.uri, _supervision_fields)

    def _recordings(self, store: ObjectStore, wanted: set[str]) -> dict[str, Mapping[str, Any]]:
        found: dict[str, Mapping[str, Any]] = {}
        for piece in LhotseCuts().pieces(store, self.recordings_uri):
            for row in json_rows(store, piece):
                if isinstance(row, Quarantined):
                    continue
                if (named := str(row.fields.get("id"))) in wanted:
                    found[named] = {**row.fields, "folder": piece.folder}
        return found


@dataclass(frozen=True, slots=True)
class Shar:
    """Shar reads folders of cuts.N.jsonl.gz beside recording.N.tar, whose members are the audio."""

    columns: ClassVar[Mapping[str, str]] = _COLUMNS
    looks: ClassVar[Sequence[Look]] = (
        Look("lhotse's Shar", "give --format shar", file=re.compile(r"recording\.\d+\.tar")),
    )
    contents: ClassVar[Sequence[str]] = ()

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield a piece for each pair of cuts and recordings."""
        there = {each.uri: each for each in store.list(uri)}
        cuts = [each for each in there.values() if _is_cuts(each)]
        if not cuts:
            raise ValueError(f"{uri} holds no cuts.*.jsonl.gz: need a folder that SharWriter wrote")
        for each in cuts:
            folder, _, name = each.uri.rpartition("/")
            tar = f"{folder}/recording.{name.split('.')[1]}.tar"
            if tar not in there:
                raise ValueError(f"{tar}: missing beside {each.uri}: a compressed tar is not read")
            yield whole([each, there[tar]], folder)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield each cut as the member with its id."""
        cuts, tar = piece.uris
        members = _members(store, tar)
        for row in json_rows(store, whole([ObjectInfo(cuts, 0, "")], piece.folder)):
            if isinstance(row, Quarantined):
                yield row
            elif (member := members.get(str(row.fields.get("id")))) is None:
                yield refused(row, tar, f"{tar} has no plain file with the id of this cut")
            else:
                yield Row({**_shar_fields(row.fields), "audio_uri": tar, **member}, row.num_bytes)


def _is_cuts(found: ObjectInfo) -> bool:
    name = found.uri.rpartition("/")[2]
    return name.startswith("cuts.") and name.endswith((".jsonl", ".jsonl.gz"))


def _members(store: ObjectStore, uri: str) -> dict[str, dict[str, int]]:
    """Read where the members of a tar lie, by their names without suffix."""
    members = {}
    try:
        with closing(store.open(uri)) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                stem, _, suffix = member.name.rpartition(".")
                # A sparse member's bytes lie there without its zeros.
                is_whole = member.isreg() and not member.issparse()
                if is_whole and f".{suffix}" not in _WITHOUT_AUDIO:
                    size = {"member_offset": member.offset_data, "member_bytes": member.size}
                    members[stem] = size
    except tarfile.TarError as error:
        raise ValueError(f"{uri}: no whole tar: {error}; write it again") from error
    return members


def _shar_fields(cut: Mapping[str, Any]) -> dict[str, Any]:
    try:
        about = _supervised(cut)
    except _RefusedError:
        about = {}
    return {"utterance_id": cut.get("id"), "duration_s": cut.get("duration"), **about}


def _accepted(row: Row, uri: str, fields_of: Any) -> Row | Quarantined:  # noqa: ANN401
    try:
        return Row(fields_of(row.fields), row.num_bytes)
    except _RefusedError as error:
        return refused(row, uri, str(error))


def _cut_fields(cut: Mapping[str, Any]) -> dict[str, Any]:
    if (kind := cut.get("type", "MonoCut")) != "MonoCut":
        raise _RefusedError(f"type = {kind!r}: need MonoCut, of one recording")
    return {**_place(cut), **_supervised(cut), "utterance_id": cut.get("id")}


def _supervision_fields(row: Mapping[str, Any]) -> dict[str, Any]:
    if row["recording"] is None:
        raise _RefusedError(f"recording_id = {row.get('recording_id')!r}: no such recording")
    return {**_place(row), **_supervised(row), "utterance_id": row.get("id")}


def _place(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the audio's object, and the time within it unless it is the whole recording."""
    recording = row.get("recording")
    if not isinstance(recording, dict):
        raise _RefusedError("no recording: need cuts with recordings")
    sources = recording.get("sources")
    if not isinstance(sources, list) or len(sources) != 1 or not isinstance(sources[0], dict):
        raise _RefusedError("sources: need one file of the recording")
    source = sources[0]
    if source.get("type") == "shar":
        raise _RefusedError("audio in a Shar: give --format shar and the folder of the cuts")
    if source.get("type") not in ("file", "url"):
        raise _RefusedError(f"source of type {source.get('type')!r}: need file or url")
    channels = source.get("channels") or [0]
    if not isinstance(channels, list) or len(channels) > 1:
        raise _RefusedError(f"channels {shown(channels)}: need one; write a file for each")
    if recording.get("transforms"):
        raise _RefusedError("transforms: the audio in the store is another: save the audio first")
    place = {"audio_uri": source.get("source"), "duration_s": row.get("duration")}
    if recording.get("folder"):
        place["folder"] = recording["folder"]
    is_whole = row.get("start") == 0 and row.get("duration") == recording.get("duration")
    return place if is_whole else {**place, "start_s": row.get("start")}


def _supervised(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return speaker, text and language; an utterance has one speaker."""
    supervisions = row.get("supervisions") or []
    is_list = isinstance(supervisions, list)
    if not is_list or not all(isinstance(each, dict) for each in supervisions):
        raise _RefusedError("supervisions: need a list of objects")
    if len(speakers := {str(each.get("speaker")) for each in supervisions}) > 1:
        remedy = "cut it by trim_to_supervisions()"
        raise _RefusedError(f"{len(speakers)} speakers in a cut: need one: {remedy}")
    texts = [each["text"] for each in supervisions if each.get("text")]
    first = supervisions[0] if supervisions else {}
    about = {"speaker_id": first.get("speaker"), "locale": first.get("language")}
    about |= {"text": " ".join(map(str, texts))} if texts else {}
    return by_name(("speaker_id", "locale", "text"), about)
