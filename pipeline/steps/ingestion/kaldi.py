"""Read Kaldi's data directories, with or without segments, and LibriSpeech's folders."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import MAX_LINE_BYTES, PRED_TEXT, Quarantined
from pipeline.steps.ingestion import IGNORE_COLUMNS
from pipeline.steps.ingestion.manifest_format import CHANNEL, Look, ManifestFormat, refused
from pipeline.steps.ingestion.manifest_rows import (
    Piece,
    Row,
    files_in,
    folder_of_object,
    lines_of,
    list_objects,
    whole,
)

_BLANKS = re.compile(r"[ \t]+")  # str.split would also split at control characters
_KALDI_TABLE = re.compile(r"(utt|spk|reco|rec)2\w+|\w+\.scp|segments|text")
"""The names of a data directory's tables; other files are none, as logs and copies."""

Tables: TypeAlias = Mapping[str, Mapping[str, str]]
"""The tables of a data directory by their names, each with a value for each key."""

CHANNELS_OF_RECORDINGS = "reco2file_and_channel"
OPTIONAL_TABLES = (
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


def require_known_tables(names: Iterable[str], ignored: Collection[str] = ()) -> None:
    """Raise ValueError for a table of a data directory that is neither used nor harmless."""
    known = {"wav.scp", *OPTIONAL_TABLES, *KALDI_HARMLESS, *ignored}
    if unknown := sorted(set(filter(_KALDI_TABLE.fullmatch, names)) - known):
        remedy = f"move it out of the directory, or with --manifest: {IGNORE_COLUMNS} {unknown[0]}"
        raise ValueError(f"{unknown[0]}: a table that is not known: {remedy}")


@dataclass(frozen=True, slots=True)
class Kaldi(ManifestFormat):
    """Kaldi reads wav.scp with or without segments; one task holds a directory's tables.

    Recordings are paths relative to the directory, or URIs; a command is a ledger row.
    """

    names: ClassVar[Mapping[str, str]] = {"audio_uri": "wav.scp"}
    names_channels: ClassVar[bool] = True
    looks: ClassVar[Sequence[Look]] = (
        Look("Kaldi's", "give --format kaldi and the folder", file=re.compile(r"wav\.scp")),
        Look(
            "Kaldi's archives, or a list of their entries",
            "they are not read: give --format kaldi and a folder whose wav.scp names audio files",
            file=re.compile(r".*\.ark|feats\.scp"),
            is_read=False,
        ),
    )

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield the directory as one piece."""
        there = files_in(store, uri)
        try:
            require_known_tables(there, self.options.ignored)
        except ValueError as error:
            raise ValueError(f"{uri}: {error}") from error
        if "wav.scp" not in there:
            raise ValueError(f"{join_uri(uri, 'wav.scp')}: missing; need wav.scp")
        optional = [name for name in OPTIONAL_TABLES if name not in self.options.ignored]
        yield whole([there[name] for name in ("wav.scp", *optional) if name in there], uri)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield a row for each line of segments, or else of wav.scp."""
        tables = {uri.rpartition("/")[2]: parse_table(uri, store.get(uri)) for uri in piece.uris}
        return rows_of(tables, piece.uri)


NAMING = ("text", "utt2spk")
"""The tables each of whose lines is of an utterance."""


def rows_of(tables: Tables, uri: str) -> Iterator[Row | Quarantined]:
    """Yield a row for each line of segments, or else of wav.scp, of tables by their names.

    A transcript or speaker without audio is a row that is refused.
    """
    recordings = tables["wav.scp"]
    has_segments = "segments" in tables
    utterances = tables.get("segments", dict.fromkeys(recordings, ""))
    for key, segment in utterances.items():
        recording, *place = (segment.split() or [""]) if has_segments else [key]
        fields = {"utterance_id": key, **_fields(tables, key, recording)}
        row = Row({**fields, "id": key}, len(key) + len(segment))
        path = recordings.get(recording)
        if path is None or (has_segments and len(place) not in (2, 3)):
            need = "need a recording of wav.scp, start, end, and maybe a channel"
            yield refused(row, uri, f"segments: {segment!r}: {need}")
        elif is_command(path):
            detail = f"a command ({path[:60]}) is not run: name files in wav.scp"
            yield refused(row, uri, detail)
        else:
            length_s = _number(tables.get("reco2dur", {}).get(recording))
            fields |= _segment(place, length_s) if place else {}
            yield Row({**fields, "audio_uri": path}, row.num_bytes)
    of_audio = "segments" if has_segments else "wav.scp"
    named = dict.fromkeys(key for each in NAMING for key in tables.get(each, {}))
    for key in named:
        if key not in utterances:
            where = " and ".join(each for each in NAMING if key in tables.get(each, {}))
            need = "add its audio, or remove the line, as Kaldi's fix_data_dir.sh does"
            yield refused(
                Row({"id": key}, len(key)), uri, f"{where}: {key} is not in {of_audio}: {need}"
            )


def is_command(path: str) -> bool:
    """Return whether a line of wav.scp is a command that writes audio."""
    return path.startswith("|") or path.endswith("|")


def parse_table(uri: str, data: bytes, *, needs_values: bool = False) -> dict[str, str]:
    """Read lines of a key and a value; ValueError for a key that has two lines, or no value."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{uri}: not UTF-8: {error}: convert it") from error
    table: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not (content := line.strip(" \t\r")):
            continue
        key, *value = _BLANKS.split(content, maxsplit=1)
        if needs_values and not value:
            raise ValueError(f"{uri}:{number}: {key} alone: need a key and a value")
        if key in table:
            raise ValueError(f"{uri}:{number}: {key} a second time: keep one line")
        table[key] = value[0] if value else ""
    return table


def text_rows(store: ObjectStore, piece: Piece) -> Iterator[Row]:
    """Yield the lines of a `text` that a recognizer wrote, by id; one may have heard no word.

    ValueError for a line that is too long or not UTF-8.
    """
    for number, line in enumerate(lines_of(store, piece), 1):
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(
                f"{piece.uri}:{number}: a line beyond {MAX_LINE_BYTES} bytes: split it"
            )
        try:
            content = line.decode("utf-8-sig" if number == 1 else "utf-8").strip(" \t\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"{piece.uri}:{number}: not UTF-8: {error}: convert it") from error
        if content:
            utterance_id, *text = _BLANKS.split(content, maxsplit=1)
            yield Row({"utterance_id": utterance_id, PRED_TEXT: "".join(text)}, len(line))


def _fields(tables: Tables, key: str, recording: str) -> dict[str, Any]:
    def value(table: str, key: str) -> str | None:
        return tables.get(table, {}).get(key)

    speaker_id = value("utt2spk", key)
    found = {
        "speaker_id": speaker_id,
        "text": value("text", key),
        "created_at": value("utt2time", key),
        "duration_s": _number(value("utt2dur", key)),
        "placement": value("utt2placement", key),
        CHANNEL: channel_of_side(value(CHANNELS_OF_RECORDINGS, recording)),
        "locale": tables.get("spk2locale", {}).get(str(speaker_id), value("utt2lang", key)),
    }
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


_TRANSCRIPTS = ".trans.txt"
_LISTS_PER_PIECE = 64  # each is of a chapter


@dataclass(frozen=True, slots=True)
class LibriSpeech(ManifestFormat):
    """LibriSpeech reads SPEAKER/CHAPTER/SPEAKER-CHAPTER.trans.txt, beside the FLACs it names."""

    takes: ClassVar[Collection[str]] = ()
    looks: ClassVar[Sequence[Look]] = (
        Look(
            "LibriSpeech's",
            "give --format librispeech and the folder above the chapters",
            file=re.compile(r".*\.trans\.txt"),
        ),
    )

    def pieces(self, store: ObjectStore, uri: str) -> Iterator[Piece]:
        """Yield some chapters' transcripts at a time."""
        found = list_objects(store, uri, (_TRANSCRIPTS,))
        lists = [each for each in found if each.uri.endswith(_TRANSCRIPTS)]
        for start in range(0, len(lists), _LISTS_PER_PIECE):
            yield whole(lists[start : start + _LISTS_PER_PIECE], uri)

    def rows(self, store: ObjectStore, piece: Piece) -> Iterator[Row | Quarantined]:
        """Yield each utterance; its speaker is what its id begins with."""
        for uri in piece.uris:
            folder = folder_of_object(uri)
            for key, text in parse_table(uri, store.get(uri)).items():
                fields = {"utterance_id": key, "speaker_id": key.partition("-")[0], "text": text}
                audio_uri = join_uri(folder, f"{key}.flac")
                yield Row({**fields, "locale": "en", "audio_uri": audio_uri}, len(key) + len(text))
