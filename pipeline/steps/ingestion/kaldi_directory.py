"""Read and check a Kaldi data directory with lists of speakers, before copying begins.

Needed: wav.scp, text, utt2spk, lexicon.txt, {labelled,unlabelled,heldout}.speakers. Optional:
dev.speakers, utt2placement, utt2time (ISO 8601 with an offset), utt2dur (seconds), spk2locale or
utt2lang, and language_model.txt and language_model.arpa, also with .gz, which evaluation may use.
"""

import codecs
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from pipeline.runs.names import (
    ALL_SUBSETS,
    DEV,
    LABELLED,
    LANGUAGE_MODEL_FILES,
    SUBSETS,
    UNLABELLED,
)
from pipeline.sampling import sampling_priority
from pipeline.steps.ingestion.kaldi import (
    CHANNELS_OF_RECORDINGS,
    Tables,
    channel_of_side,
    is_command,
    parse_table,
    require_known_tables,
    rows_of,
)
from pipeline.steps.ingestion.manifest_records import ARCHIVE_ENTRY, OF_ARCHIVE
from pipeline.steps.ingestion.manifest_rows import Row

UNDETERMINED_LOCALE = "und"
_UNSAFE_IN_KEYS = "/\\%"
_OF_UTTERANCES = ("utt2spk", "text", "utt2placement", "utt2time", "utt2dur", "utt2lang")
_NEEDED = ("wav.scp", "utt2spk", "text")


@dataclass(frozen=True, slots=True)
class KaldiUtterance:
    """KaldiUtterance is one utterance; `text` is always None in the unlabelled subset.

    `created_at` and `declared_duration_s` are None where the directory does not state them.
    `audio_path` may not exist; `listed_path` is its spelling in wav.scp. One that `is_simulated`
    is stored as it sounds in its placement. `stream` names one of several streams of the speaker.
    """

    utterance_id: str
    speaker_id: str
    subset: str
    locale: str
    audio_path: Path
    listed_path: str
    text: str | None
    placement: str | None
    created_at: str | None
    declared_duration_s: float | None
    is_simulated: bool = False
    stream: str | None = None


@dataclass(frozen=True, slots=True)
class KaldiDirectory:
    """KaldiDirectory holds the utterances by speaker and id, and a count.

    `language_data` holds the files of language models that are there. `num_unlisted` counts the
    utterances of speakers that are in no list.
    """

    utterances: tuple[KaldiUtterance, ...]
    language_data: Mapping[str, bytes]
    num_unlisted: int


def read_kaldi_directory(
    path: Path, dev_share: float = 0.0, locale: str = UNDETERMINED_LOCALE
) -> KaldiDirectory:
    """Read the tables of the directory at `path`; a ValueError names the file and the remedy.

    With `dev_share`, that share of the labelled speakers, by a hash of their ids, become
    development speakers. `locale` is that of speakers without one.
    """
    tables = _tables(path)
    subset_of = _read_subsets(path, set(tables["utt2spk"].values()))
    if dev_share:
        subset_of |= dict.fromkeys(_development_speakers(path, subset_of, dev_share), DEV)
    utterances = [
        _utterance(path, tables, row.fields, subset_of[row.fields["speaker_id"]], locale)
        for row in rows_of(tables, str(path))
        if isinstance(row, Row) and row.fields["speaker_id"] in subset_of
    ]
    utterances.sort(key=lambda each: (each.speaker_id, each.utterance_id))
    there = [name for name in LANGUAGE_MODEL_FILES if (path / name).exists()]
    return KaldiDirectory(
        utterances=tuple(utterances),
        language_data={name: _language_data(path / name) for name in there},
        num_unlisted=len(tables["wav.scp"]) - len(utterances),
    )


def _tables(path: Path) -> Tables:
    """Read the tables of the directory, checked against wav.scp."""
    if (path / "segments").exists():
        remedy = "ingest by --manifest DIR --format kaldi, or run Kaldi's extract-segments"
        raise ValueError(f"{path}/segments: recordings are not cut into utterances: {remedy}")
    try:
        require_known_tables(each.name for each in path.iterdir())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    names = (*_NEEDED, *_OF_UTTERANCES, "spk2locale", CHANNELS_OF_RECORDINGS)
    tables = {
        name: parse_table(str(path / name), file_bytes(path / name), needs_values=name != "text")
        for name in dict.fromkeys(names)
        if name in _NEEDED or (path / name).exists()
    }
    for key, line in tables.get(CHANNELS_OF_RECORDINGS, {}).items():
        if channel_of_side(line) != "0":
            remedy = "write a file for each side; then remove this table"
            raise ValueError(f"{path / CHANNELS_OF_RECORDINGS}: {key} {line}: {remedy}")
    recordings = tables["wav.scp"]
    for key, value in recordings.items():
        _require_file_name(f"{path}/wav.scp: {key}", key, value)
    for name in _OF_UTTERANCES:
        if unknown := sorted(tables.get(name, {}).keys() - recordings.keys()):
            remedy = "add them there, or remove these lines"
            raise ValueError(f"{path / name}: {_some(unknown)} not in wav.scp: {remedy}")
    if without := sorted(recordings.keys() - tables["utt2spk"].keys()):
        raise ValueError(f"{path}/utt2spk: {_some(without)} of wav.scp without speaker: add")
    return tables


def _utterance(
    path: Path, tables: Tables, fields: Mapping[str, object], subset: str, locale: str
) -> KaldiUtterance:
    """Make an utterance of the fields of its row; ValueError for one that is no such value."""

    def text_of(name: str) -> str | None:
        return None if (value := fields.get(name)) is None else str(value)

    utterance_id, speaker_id = str(fields["utterance_id"]), str(fields["speaker_id"])
    text = text_of("text") if subset != UNLABELLED else None
    if subset != UNLABELLED and text is None:
        remedy = f"add it, or take speaker {speaker_id} out of {subset}.speakers"
        raise ValueError(f"{path}/text: no transcript of {utterance_id}: {remedy}")
    created_at, duration_s = text_of("created_at"), fields.get("duration_s")
    if created_at is not None and not _has_offset(created_at):
        bound = "need ISO 8601 with an offset, as 2020-01-31T12:00:00+00:00"
        raise ValueError(f"{path}/utt2time: {utterance_id} {created_at}: {bound}")
    is_time = isinstance(duration_s, float) and 0 < duration_s < math.inf
    if duration_s is not None and not is_time:
        stated = tables["utt2dur"][utterance_id]
        raise ValueError(f"{path}/utt2dur: {utterance_id} {stated}: need seconds above 0")
    listed_path = str(fields["audio_uri"])
    return KaldiUtterance(
        utterance_id=utterance_id,
        speaker_id=speaker_id,
        subset=subset,
        locale=text_of("locale") or locale,
        audio_path=path / listed_path,
        listed_path=listed_path,
        text=text,
        placement=text_of("placement"),
        created_at=created_at,
        declared_duration_s=duration_s if isinstance(duration_s, float) else None,
    )


def _has_offset(moment: str) -> bool:
    try:
        return datetime.fromisoformat(moment).tzinfo is not None
    except ValueError:
        return False


def _read_subsets(path: Path, speakers: Collection[str]) -> dict[str, str]:
    subset_of: dict[str, str] = {}
    for subset in ALL_SUBSETS:
        file = path / f"{subset}.speakers"
        if subset == DEV and not file.exists():
            continue
        lines = (line.strip(" \t\r") for line in _text(file).split("\n"))
        listed = [line for line in lines if line]
        if unknown := sorted(set(listed) - set(speakers)):
            raise ValueError(f"{file}: {_some(unknown)} not in utt2spk: remove from the list")
        for speaker_id in listed:
            if subset_of.setdefault(speaker_id, subset) != subset:
                other = f"{subset_of[speaker_id]}.speakers"
                raise ValueError(f"{file}: {speaker_id} also in {other}: leave it in one")
        if not listed:
            raise ValueError(f"{file}: lists no speaker: need at least one")
    return subset_of


def _development_speakers(path: Path, subset_of: Mapping[str, str], share: float) -> list[str]:
    """Return this share of the labelled speakers, at least one: those of the lowest hashes."""
    if DEV in subset_of.values():
        remedy = "leave out --dev-share, or remove the list"
        raise ValueError(f"{path}/{DEV}.speakers lists the development speakers: {remedy}")
    labelled = [speaker for speaker, subset in subset_of.items() if subset == LABELLED]
    if len(labelled) < 2:
        remedy = "need two, one for training and one for development"
        raise ValueError(f"{path}/{LABELLED}.speakers: lists one speaker: {remedy}")
    number = min(max(round(share * len(labelled)), 1), len(labelled) - 1)
    return sorted(labelled, key=lambda speaker: (sampling_priority(0, speaker), speaker))[:number]


def _require_file_name(where: str, utterance_id: str, value: str) -> None:
    if is_command(value):
        remedy = "run the commands once into WAV or FLAC files, and name these"
        raise ValueError(f"{where}: a command ({value[:60]}) is not run: {remedy}")
    if ARCHIVE_ENTRY.search(value):
        raise ValueError(f"{where}: {value[:60]}: {OF_ARCHIVE}")
    if utterance_id.startswith(".") or any(mark in utterance_id for mark in _UNSAFE_IN_KEYS):
        raise ValueError(f"{where}: becomes an object key: rename it without / \\ % or leading dot")


def _text(file: Path) -> str:
    try:
        return file_bytes(file).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8: {error}: convert it") from error


def file_bytes(file: Path) -> bytes:
    """Read a file of a directory without its byte-order mark; ValueError if it is missing."""
    try:
        return file.read_bytes().removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError as error:
        needed = f"text, utt2spk, wav.scp, lexicon.txt, {', '.join(SUBSETS)}.speakers"
        raise ValueError(f"{file}: missing; a data directory needs {needed}") from error


def _language_data(file: Path) -> bytes:
    return file.read_bytes() if file.suffix == ".gz" else _text(file).encode()


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
