"""Read the directories of corpora: Kaldi with segments, LibriSpeech, Common Voice."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Quarantined
from pipeline.steps.ingestion.formats import (
    ABOUT_SPEAKERS,
    ABOUT_TEXTS,
    CHANNEL,
    Look,
    refused,
)
from pipeline.steps.ingestion.manifest_rows import (
    DELIMITED,
    IGNORE_COLUMNS,
    KnownFields,
    Piece,
    Row,
    csv_rows,
    files_in,
    files_of,
    folder_of_object,
    in_groups,
    list_objects,
    split_unquoted,
    whole,
)

_BLANKS = re.compile(r"[ \t]+")
_KALDI_TABLE = re.compile(r"(utt|spk|reco|rec)2\w+|\w+\.scp|segments|text")
"""The names of a data directory's tables; other files are none, as logs and copies."""

CHANNELS_OF_RECORDINGS = "reco2file_and_channel"
_KALDI_OPTIONAL = (
    *("segments", "text", "utt2spk", "utt2dur", "utt2time", "utt2placement", "utt2lang"),
    *("spk2locale", "reco2dur", CHANNELS_OF_RECORDINGS),
)
KALDI_HARMLESS = (
    *("spk2utt", "spk2gender", "utt2gender", "utt2uniq", "utt2category", "reco2num_spk"),
    *("feats.scp", "cmvn.scp", "vad.scp", "ivector.scp", "xvector.scp", "spk_xvector.scp"),
    *("utt2num_frames", "utt2max_frames", "utt2num_samples", "utt2warp", "spk2warp"),
    *("utt2sid", "spk2sid", "utt2lid"),
)
"""The tables of a data directory that change neither audio nor transcript nor speaker."""

_TRANSCRIPTS = ".trans.txt"
_CLIP_DURATIONS = "clip_durations.tsv"
_DURATION_COLUMNS = ("clip", "duration[ms]")


def require_known_tables(names: Iterable[str], ignored: Collection[str] = ()) -> None:
    """Raise ValueError for a table of a data directory that is neither used nor harmless."""
    known = {"wav.scp", *_KALDI_OPTIONAL, *KALDI_HARMLESS, *ignored}
    if unknown := sorted(set(filter(_KALDI_TABLE.fullmatch, names)) - known):
        remedy = f"move it out of the directory, or with --manifest: {IGNORE_COLUMNS} {unknown[0]}"
        raise ValueError(f"{unknown[0]}: a table that is not known: {remedy}")


ARCHIVES = Look(
    "Kaldi's archives, or a list of their entries",
    "they are not read: give --format kaldi and a folder whose wav.scp names audio files",
    file=re.compile(r".*\.ark|feats\.scp"),
)


@dataclass(frozen=True, slots=True)
class Kaldi:
    """Kaldi reads wav.scp with or without segments; one task holds a directory's tables.

    Recordings are paths relative to the directory, or URIs; a command is a ledger row. Tables that
    are `ignored` are passed over.
    """

    ignored: Collection[str] = ()

    columns: ClassVar[Mapping[str, str]] = {"audio_uri": "wav.scp"}
    looks: ClassVar[Sequence[Look]] = (
        Look("Kaldi's", "give --format kaldi and the folder", file=re.compile(r"wav\.scp")),
    )
    contents: ClassVar[Sequence[str]] = ()

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield the directory as one piece."""
        try:
            require_known_tables(files_in(store, uri), self.ignored)
        except ValueError as error:
            raise ValueError(f"{uri}: {error}") from error
        optional = [name for name in _KALDI_OPTIONAL if name not in self.ignored]
        yield whole(files_of(store, uri, ("wav.scp",), optional), uri)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield a row for each line of segments, or else of wav.scp."""
        tables = {uri.rpartition("/")[2]: _table(store, uri) for uri in piece.uris}
        recordings = tables["wav.scp"]
        has_segments = "segments" in tables
        utterances = tables.get("segments", dict.fromkeys(recordings, ""))
        for key, segment in utterances.items():
            recording, *place = (segment.split() or [""]) if has_segments else [key]
            fields = {"utterance_id": key, **_kaldi_fields(tables, key, recording)}
            row = Row({**fields, "id": key}, len(key) + len(segment))
            path = recordings.get(recording)
            if path is None or (has_segments and len(place) not in (2, 3)):
                need = "need a recording of wav.scp, start, end, and maybe a channel"
                yield refused(row, piece.uri, f"segments: {segment!r}: {need}")
            elif path.startswith("|") or path.endswith("|"):
                detail = f"a command ({path[:60]}) is not run: name files in wav.scp"
                yield refused(row, piece.uri, detail)
            else:
                length_s = _number(tables.get("reco2dur", {}).get(recording))
                fields |= _segment(place, length_s) if place else {}
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


def _kaldi_fields(
    tables: Mapping[str, Mapping[str, str]], key: str, recording: str
) -> dict[str, Any]:
    found = {
        "speaker_id": tables.get("utt2spk", {}).get(key),
        "text": tables.get("text", {}).get(key),
        "created_at": tables.get("utt2time", {}).get(key),
        "duration_s": _number(tables.get("utt2dur", {}).get(key)),
        "placement": tables.get("utt2placement", {}).get(key),
        CHANNEL: channel_of_side(tables.get(CHANNELS_OF_RECORDINGS, {}).get(recording)),
    }
    language = tables.get("utt2lang", {}).get(key)
    found["locale"] = tables.get("spk2locale", {}).get(str(found["speaker_id"]), language)
    return {name: value for name, value in found.items() if value is not None}


def channel_of_side(line: str | None) -> str | None:
    """Return the channel that a line of reco2file_and_channel names, of which A or 1 is first."""
    side = (line or " ").split()[-1:]
    return {"A": "0", "1": "0", "B": "1", "2": "1"}.get(side[0], side[0]) if side else None


def _segment(place: list[str], length_s: float | str | None) -> dict[str, Any]:
    """Return the fields of a segment's start, end and channel; an end of -1 is the recording's.

    Without the recording's length its duration is the utterance's, or what the audio leaves.
    """
    start_s, end_s, *channel = place[0], place[1], *place[2:]
    named = {CHANNEL: channel[0]} if channel else {}
    start, end = _number(start_s), _number(end_s)
    if end == -1.0:
        end = length_s
        if end is None:
            return {"start_s": start, **named}
    if not isinstance(start, float) or not isinstance(end, float):
        return {"start_s": start_s, "duration_s": end_s, **named}  # the record's check names it
    return {"start_s": start, "duration_s": round(end - start, 6), **named}


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


_CLIP_COLUMNS = {
    "speaker_id": "client_id",
    "text": "sentence",
    "locale": "locale",
}
COMMON_VOICE_HARMLESS = (*ABOUT_SPEAKERS, *ABOUT_TEXTS)


@dataclass(frozen=True, slots=True)
class CommonVoice:
    """CommonVoice reads tables such as train.tsv, beside clips/ and maybe clip_durations.tsv.

    Columns that are `ignored` are passed over.
    """

    ignored: Collection[str] = ()

    columns: ClassVar[Mapping[str, str]] = {
        "audio_uri": "path",
        "utterance_id": "path",
        **_CLIP_COLUMNS,
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
        known = KnownFields(("path", *_CLIP_COLUMNS.values()), COMMON_VOICE_HARMLESS, self.ignored)
        for row in csv_rows(store, table, split_unquoted, known):
            if isinstance(row, Quarantined):
                yield row
                continue
            path = str(row.fields.get("path", ""))
            found = {
                "utterance_id": path.rpartition(".")[0] or path or None,
                **{name: row.fields.get(column) for name, column in _CLIP_COLUMNS.items()},
                "duration_s": seconds.get(path),
                "audio_uri": f"clips/{path}" if path else None,
            }
            fields = {name: value for name, value in found.items() if value is not None}
            yield Row(fields, row.num_bytes)


def _clip_seconds(store: ObjectStore, uri: str) -> dict[str, float]:
    """Read the milliseconds that Common Voice states of each clip."""
    seconds = {}
    for row in csv_rows(store, uri, split_unquoted, KnownFields(_DURATION_COLUMNS)):
        if not isinstance(row, Quarantined):
            clip, milliseconds = (str(row.fields.get(name, "")) for name in _DURATION_COLUMNS)
            number = _number(milliseconds)
            if isinstance(number, float):
                seconds[clip] = number / 1000
    return seconds
