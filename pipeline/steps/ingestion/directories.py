"""Read the directories of corpora: Kaldi with segments, LibriSpeech, Common Voice."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Quarantined
from pipeline.steps.ingestion.formats import Look, common_voice_rows, refused
from pipeline.steps.ingestion.manifest_objects import (
    DELIMITED,
    Piece,
    files_of,
    folder_of_object,
    in_groups,
    list_objects,
    whole,
)
from pipeline.steps.ingestion.manifest_rows import Row

_BLANKS = re.compile(r"[ \t]+")
_KALDI_OPTIONAL = ("segments", "text", "utt2spk", "utt2dur", "utt2time", "spk2locale")
_TRANSCRIPTS = ".trans.txt"
_CLIP_DURATIONS = "clip_durations.tsv"

ARCHIVES = Look(
    "Kaldi's archives, or a list of their entries",
    "they are not read: give --format kaldi and a folder whose wav.scp names audio files",
    file=re.compile(r".*\.ark|feats\.scp"),
)


@dataclass(frozen=True, slots=True)
class Kaldi:
    """Kaldi reads wav.scp with or without segments; one task holds a directory's tables.

    Recordings are paths relative to the directory, or URIs; a command is a ledger row.
    """

    columns: ClassVar[Mapping[str, str]] = {"audio_uri": "wav.scp"}
    looks: ClassVar[Sequence[Look]] = (
        Look("Kaldi's", "give --format kaldi and the folder", file=re.compile(r"wav\.scp")),
    )
    contents: ClassVar[Sequence[str]] = ()

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield the directory as one piece."""
        yield whole(files_of(store, uri, ("wav.scp",), _KALDI_OPTIONAL), uri)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield a row for each line of segments, or else of wav.scp."""
        tables = {uri.rpartition("/")[2]: _table(store, uri) for uri in piece.uris}
        recordings = tables["wav.scp"]
        utterances = tables.get("segments", dict.fromkeys(recordings, ""))
        for key, segment in utterances.items():
            recording, *times = segment.split() or [""] if "segments" in tables else [key]
            fields = {"utterance_id": key, **_kaldi_fields(tables, key), **_times(times)}
            row = Row({**fields, "id": key}, len(key) + len(segment))
            path = recordings.get(recording)
            if path is None or (times and len(times) < 2):
                yield refused(row, piece.uri, f"segments: {segment!r}: need a recording of wav.scp")
            elif path.startswith("|") or path.endswith("|"):
                detail = f"a command ({path[:60]}) is not run: name files in wav.scp"
                yield refused(row, piece.uri, detail)
            else:
                yield Row({**fields, "audio_uri": path}, row.num_bytes)


def _table(store: ObjectStore, uri: str) -> dict[str, str]:
    table: dict[str, str] = {}
    try:
        text = store.get(uri).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{uri}: not UTF-8: {error}: convert it") from error
    for number, line in enumerate(text.split("\n"), 1):
        if not (content := line.strip(" \t\r")):
            continue
        key, *value = _BLANKS.split(content, maxsplit=1)
        if key in table:
            raise ValueError(f"{uri}:{number}: {key} a second time: keep one line")
        table[key] = value[0] if value else ""
    return table


def _kaldi_fields(tables: Mapping[str, Mapping[str, str]], key: str) -> dict[str, Any]:
    found = {
        "speaker_id": tables.get("utt2spk", {}).get(key),
        "text": tables.get("text", {}).get(key),
        "created_at": tables.get("utt2time", {}).get(key),
        "duration_s": _number(tables.get("utt2dur", {}).get(key)),
    }
    found["locale"] = tables.get("spk2locale", {}).get(str(found["speaker_id"]))
    return {name: value for name, value in found.items() if value is not None}


def _times(times: list[str]) -> dict[str, Any]:
    if len(times) < 2:
        return {}
    start_s, end_s = _number(times[0]), _number(times[1])
    if isinstance(start_s, str) or isinstance(end_s, str) or start_s is None or end_s is None:
        return {"start_s": times[0], "duration_s": times[1]}  # the record's check names it
    return {"start_s": start_s, "duration_s": round(end_s - start_s, 6)}


def _number(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class LibriSpeech:
    """LibriSpeech reads SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt, beside the FLACs it names."""

    columns: ClassVar[Mapping[str, str]] = {}
    looks: ClassVar[Sequence[Look]] = (
        Look(
            "LibriSpeech's",
            "give --format librispeech and the folder above the chapters",
            file=re.compile(r".*\.trans\.txt"),
        ),
    )
    contents: ClassVar[Sequence[str]] = ()

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield some chapters' transcripts at a time."""
        objects = list_objects(store, uri, (_TRANSCRIPTS,))
        yield from in_groups(objects, uri, lambda each: each.uri.endswith(_TRANSCRIPTS))

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield each utterance; its speaker is what its id begins with."""
        for uri in piece.uris:
            folder = folder_of_object(uri)
            for key, text in _table(store, uri).items():
                fields = {"utterance_id": key, "speaker_id": key.partition("-")[0], "text": text}
                audio_uri = join_uri(folder, f"{key}.flac")
                yield Row({**fields, "locale": "en", "audio_uri": audio_uri}, len(key) + len(text))


@dataclass(frozen=True, slots=True)
class CommonVoice:
    """CommonVoice reads tables such as train.tsv, beside clips/ and maybe clip_durations.tsv."""

    columns: ClassVar[Mapping[str, str]] = {
        "audio_uri": "path",
        "utterance_id": "path",
        "speaker_id": "client_id",
        "text": "sentence",
    }
    looks: ClassVar[Sequence[Look]] = (
        Look(
            "a table of Common Voice",
            "give --format common_voice",
            frozenset({"client_id", "path", "sentence"}),
            re.compile(r"(validated|clip_durations)\.tsv"),
        ),
    )
    contents: ClassVar[Sequence[str]] = (DELIMITED,)

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield the table, with the table of durations where there is one."""
        found, *others = list_objects(store, uri, (".tsv",))
        if others:
            tables = [found.uri, *(each.uri for each in others)]
            train = [each for each in tables if each.endswith("/train.tsv")]
            need = f"name one of them, such as {[*train, *tables][0]}"
            raise ValueError(f"{uri} holds {len(tables)} tables: {need}")
        folder = folder_of_object(found.uri)
        durations = [e for e in store.list(folder) if e.uri == join_uri(folder, _CLIP_DURATIONS)]
        yield whole([found, *durations], folder)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield each clip; a client is a speaker."""
        table, *others = piece.uris
        seconds = _clip_seconds(store, others[0]) if others else {}
        for row in common_voice_rows(store, table):
            if isinstance(row, Quarantined):
                yield row
                continue
            path = str(row.fields.get("path", ""))
            found = {
                "utterance_id": path.rpartition(".")[0] or path or None,
                "speaker_id": row.fields.get("client_id"),
                "text": row.fields.get("sentence"),
                "locale": row.fields.get("locale"),
                "duration_s": seconds.get(path),
                "audio_uri": f"clips/{path}" if path else None,
            }
            fields = {name: value for name, value in found.items() if value is not None}
            yield Row(fields, row.num_bytes)


def _clip_seconds(store: ObjectStore, uri: str) -> dict[str, float]:
    """Read the milliseconds that Common Voice states of each clip."""
    seconds = {}
    for row in common_voice_rows(store, uri):
        if not isinstance(row, Quarantined):
            clip, milliseconds = [*row.fields.values(), "", ""][:2]
            number = _number(str(milliseconds))
            if isinstance(number, float):
                seconds[str(clip)] = number / 1000
    return seconds
