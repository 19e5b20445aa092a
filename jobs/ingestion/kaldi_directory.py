"""Read and check a Kaldi data directory with three lists of speakers, before copying begins.

Needed: wav.scp, text, utt2spk, lexicon.txt, {labelled,unlabelled,heldout}.speakers. Optional:
dev.speakers, utt2placement, utt2time (ISO 8601 with an offset), utt2dur (seconds), spk2locale or
utt2lang, and language_model.txt and language_model.arpa, also with .gz, which evaluation may use.
"""

import codecs
import math
import re
from collections.abc import Callable, Mapping
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
from pipeline.steps.ingestion.directories import (
    CHANNELS_OF_RECORDINGS,
    channel_of_side,
    require_known_tables,
)
from pipeline.steps.ingestion.manifest_records import ARCHIVE_ENTRY, OF_ARCHIVE

UNDETERMINED_LOCALE = "und"
_UNSAFE_IN_KEYS = "/\\%"
_BLANKS = re.compile(r"[ \t]+")  # str.split would also split at control characters


@dataclass(frozen=True, slots=True)
class KaldiUtterance:
    """KaldiUtterance is one utterance; `text` is always None in the unlabelled subset.

    `created_at` and `declared_duration_s` are None where the directory does not state them.
    `audio_path` may not exist; `listed_path` is its spelling in wav.scp. `simulate` makes the FLAC
    to store from the file's bytes; None copies them. `stream` names one of several streams of the
    speaker.
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
    simulate: Callable[[bytes], bytes] | None = None
    stream: str | None = None


@dataclass(frozen=True)
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
    tables = _Tables(path, locale)
    subset_of = _read_subsets(path, set(tables.speaker_of.values()))
    if dev_share:
        subset_of |= dict.fromkeys(_development_speakers(path, subset_of, dev_share), DEV)
    listed = [
        utterance_id
        for utterance_id, speaker_id in sorted(tables.speaker_of.items(), key=_by_speaker)
        if speaker_id in subset_of
    ]
    there = [name for name in LANGUAGE_MODEL_FILES if (path / name).exists()]
    return KaldiDirectory(
        utterances=tuple(tables.utterance(key, subset_of) for key in listed),
        language_data={name: _language_data(path / name) for name in there},
        num_unlisted=len(tables.speaker_of) - len(listed),
    )


class _Tables:
    """_Tables holds the tables of the directory by utterance, checked against wav.scp."""

    def __init__(self, path: Path, locale: str) -> None:
        self.path, self.locale = path, locale
        if (path / "segments").exists():
            remedy = "ingest by --manifest DIR --format kaldi, or run Kaldi's extract-segments"
            raise ValueError(f"{path}/segments: recordings are not cut into utterances: {remedy}")
        _require_known_tables(path)
        self.listed_path_of = _table(path, "wav.scp")
        for key, value in self.listed_path_of.items():
            _require_file_name(f"{path}/wav.scp: {key}", key, value)
        self.speaker_of = self._by_utterance("utt2spk")
        self.text_of = self._by_utterance("text")
        self.placement_of = self._by_utterance("utt2placement", optional=True)
        self.created_at_of = self._by_utterance("utt2time", optional=True)
        self.duration_of = self._by_utterance("utt2dur", optional=True)
        self.locale_of = _table(path, "spk2locale", optional=True)
        self.language_of = self._by_utterance("utt2lang", optional=True)
        if without := sorted(self.listed_path_of.keys() - self.speaker_of.keys()):
            raise ValueError(f"{path}/utt2spk: {_some(without)} of wav.scp without speaker: add")

    def utterance(self, utterance_id: str, subset_of: Mapping[str, str]) -> KaldiUtterance:
        speaker_id = self.speaker_of[utterance_id]
        subset = subset_of[speaker_id]
        text = self.text_of.get(utterance_id) if subset != UNLABELLED else None
        if subset != UNLABELLED and text is None:
            remedy = f"add it, or take speaker {speaker_id} out of {subset}.speakers"
            raise ValueError(f"{self.path}/text: no transcript of {utterance_id}: {remedy}")
        language = self.language_of.get(utterance_id, self.locale)
        return KaldiUtterance(
            utterance_id=utterance_id,
            speaker_id=speaker_id,
            subset=subset,
            locale=self.locale_of.get(speaker_id, language),
            audio_path=self.path / self.listed_path_of[utterance_id],
            listed_path=self.listed_path_of[utterance_id],
            text=text,
            placement=self.placement_of.get(utterance_id),
            created_at=self._created_at(utterance_id),
            declared_duration_s=self._duration_s(utterance_id),
        )

    def _by_utterance(self, name: str, *, optional: bool = False) -> dict[str, str]:
        table = _table(self.path, name, optional=optional)
        if unknown := sorted(table.keys() - self.listed_path_of.keys()):
            remedy = "add them there, or remove these lines"
            raise ValueError(f"{self.path / name}: {_some(unknown)} not in wav.scp: {remedy}")
        return table

    def _created_at(self, utterance_id: str) -> str | None:
        value = self.created_at_of.get(utterance_id)
        if value is None:
            return None
        try:
            has_offset = datetime.fromisoformat(value).tzinfo is not None
        except ValueError:
            has_offset = False
        if not has_offset:
            bound = "need ISO 8601 with an offset, as 2020-01-31T12:00:00+00:00"
            raise ValueError(f"{self.path}/utt2time: {utterance_id} {value}: {bound}")
        return value

    def _duration_s(self, utterance_id: str) -> float | None:
        value = self.duration_of.get(utterance_id)
        if value is None:
            return None
        try:
            duration_s = float(value)
        except ValueError:
            duration_s = math.nan
        if not 0 < duration_s < math.inf:
            raise ValueError(f"{self.path}/utt2dur: {utterance_id} {value}: need seconds above 0")
        return duration_s


def _require_known_tables(path: Path) -> None:
    """Raise ValueError for tables that are not known, and for a second side of a recording."""
    try:
        require_known_tables(each.name for each in path.iterdir())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    for key, line in _table(path, CHANNELS_OF_RECORDINGS, optional=True).items():
        if channel_of_side(line) != "0":
            remedy = "write a file for each side; then remove this table"
            raise ValueError(f"{path / CHANNELS_OF_RECORDINGS}: {key} {line}: {remedy}")


def _read_subsets(path: Path, speakers: set[str]) -> dict[str, str]:
    subset_of: dict[str, str] = {}
    for subset in ALL_SUBSETS:
        file = path / f"{subset}.speakers"
        if subset == DEV and not file.exists():
            continue
        listed = _lines(file)
        if unknown := sorted(set(listed) - speakers):
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
    if value.endswith("|") or value.startswith("|"):
        remedy = "run the commands once into WAV or FLAC files, and name these"
        raise ValueError(f"{where}: a command ({value[:60]}) is not run: {remedy}")
    if ARCHIVE_ENTRY.search(value):
        raise ValueError(f"{where}: {value[:60]}: {OF_ARCHIVE}")
    if utterance_id.startswith(".") or any(mark in utterance_id for mark in _UNSAFE_IN_KEYS):
        raise ValueError(f"{where}: becomes an object key: rename it without / \\ % or leading dot")


def _table(path: Path, name: str, *, optional: bool = False) -> dict[str, str]:
    file = path / name
    if optional and not file.exists():
        return {}
    table: dict[str, str] = {}
    for number, line in enumerate(_lines(file), 1):
        key, *value = _BLANKS.split(line, maxsplit=1)
        if not value and name != "text":
            raise ValueError(f"{file}:{number}: {key} alone: need a key and a value")
        if key in table:
            raise ValueError(f"{file}:{number}: {key} a second time: keep one line")
        table[key] = " ".join(value)
    return table


def _lines(file: Path) -> list[str]:
    return [content for line in _text(file).split("\n") if (content := line.strip(" \t\r"))]


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


def _by_speaker(item: tuple[str, str]) -> tuple[str, str]:
    utterance_id, speaker_id = item
    return speaker_id, utterance_id
