"""Plan a corpus before anything is written: metadata objects, audio files and ledger rows."""

import errno
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import groupby
from pathlib import Path

from infra.log_lines import progress_bar
from infra.prefetch import prefetch
from jobs.ingestion.kaldi_directory import KaldiDirectory, KaldiUtterance
from pipeline.audio.decode import MAX_DURATION_S as MAX_DECODED_S
from pipeline.audio.decode import (
    MP3_PADDING,
    decode_utterance,
    duration_tolerance,
    max_file_bytes,
    stated_duration_s,
)
from pipeline.audio.errors import AudioError
from pipeline.filterbank import SAMPLE_RATE_HZ
from pipeline.metadata import read_records
from pipeline.records import (
    MAX_DURATION_S,
    MIN_DURATION_S,
    Quarantined,
    Tally,
    Utterance,
    stream_order,
)
from pipeline.runs.manifest import sha256
from pipeline.runs.names import ALL_SUBSETS, METADATA_FOLDER, SUBSETS

NUM_SPEAKER_BUCKETS = 4
IN_FLIGHT = 16
MAX_NAME_BYTES = 255
"""The longest name of a file on Linux."""
MAX_FILE_BYTES = max_file_bytes(float(MAX_DECODED_S))
"""Extraction refuses larger files too; several are in memory at a time."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SUFFIX = re.compile(r"\.[a-z0-9]{1,8}")


@dataclass(frozen=True, slots=True)
class AudioFile:
    """AudioFile holds a file to copy, its key in the corpus, and its length if it states it.

    `convert` makes the bytes to store from the file's, whose SHA-256 is here.
    """

    path: Path
    key: str
    sha256: str
    duration_s: float | None
    convert: Callable[[bytes], bytes] = bytes  # the same object

    def read(self) -> bytes:
        """Read what to store; ValueError if the file is no longer the one that was planned with."""
        data = self.path.read_bytes()
        if sha256(data) != self.sha256:
            raise ValueError(f"{self.path}: changed while it was ingested: run the step again")
        return self.convert(data)


@dataclass(frozen=True, slots=True)
class MetadataObject:
    """MetadataObject holds the lines of one subset, day and speaker bucket, and their tally."""

    data: bytes
    tally: Tally


@dataclass(frozen=True, slots=True)
class PlannedCorpus:
    """PlannedCorpus holds all that is to be written: metadata by key, audio, language models.

    `tallies` are those of the subsets; `quarantined` utterances are in no object.
    """

    metadata: Mapping[str, MetadataObject]
    audio: Sequence[AudioFile]
    language_data: Mapping[str, bytes]
    tallies: Mapping[str, Tally]
    quarantined: tuple[Quarantined, ...]


@dataclass(frozen=True, slots=True)
class _Kept:
    """_Kept holds an utterance that goes into the corpus: its subset, its file and its record."""

    subset: str
    file: AudioFile
    record: Utterance


@dataclass(frozen=True, slots=True)
class _Fault:
    """_Fault holds the reason of a ledger row, and its detail."""

    reason: str
    detail: str


def plan_corpus(directory: KaldiDirectory) -> PlannedCorpus:
    """Read all audio, make all records, and read each record as selection will.

    An absent file, a record that its reader refuses, and audio of which no placement can be
    simulated make ledger rows.
    """
    looked = prefetch(_look, directory.utterances, IN_FLIGHT)
    total = len(directory.utterances)
    progress = progress_bar(looked, description="read", total=total, unit="utterance")
    kept: list[_Kept] = []
    rows: list[Quarantined] = []
    for _, stream in groupby(progress, key=lambda pair: pair[0].speaker_id):
        for each in _judged(stream):
            if isinstance(each, Quarantined):
                rows.append(each)
            else:
                kept.append(each)
    records = {s: [each.record for each in kept if each.subset == s] for s in ALL_SUBSETS}
    # A corpus without development speakers is as it was before there were any.
    records = {s: some for s, some in records.items() if some or s in SUBSETS}
    return PlannedCorpus(
        metadata=_metadata(records),
        audio=[each.file for each in kept],
        language_data=directory.language_data,
        tallies={subset: Tally.of(some) for subset, some in records.items()},
        quarantined=tuple(rows),
    )


def _look(utterance: KaldiUtterance) -> AudioFile | Quarantined:
    path = utterance.audio_path
    suffix = path.suffix.lower() if utterance.simulate is None else ".flac"
    name = f"{utterance.utterance_id}{suffix if _SUFFIX.fullmatch(suffix) else ''}"
    # S3 limits the rate of requests by prefix, so the hash comes early in the key.
    key = f"audio/{_hash(utterance.utterance_id):02x}/{name}"
    if (fault := _fault(utterance, name)) is not None:
        return _row(utterance, key, fault)
    data = path.read_bytes()
    try:
        duration_s = _duration_s(utterance, data)
    except AudioError as error:
        return _row(utterance, key, _Fault(error.reason, error.detail))
    if duration_s is None or duration_s > MAX_DURATION_S:
        return AudioFile(path, key, sha256(data), None)
    declared_s = utterance.declared_duration_s or duration_s
    missing_s, surplus_s = duration_tolerance(declared_s, MP3_PADDING)
    if not -missing_s <= duration_s - declared_s <= surplus_s:
        detail = f"the file lasts {duration_s:.3f} s, utt2dur says {declared_s:.3f} s"
        return _row(utterance, key, _Fault("duration_mismatch", detail))
    return AudioFile(path, key, sha256(data), duration_s, utterance.simulate or bytes)


def _duration_s(utterance: KaldiUtterance, data: bytes) -> float | None:
    """Return the length that a file states, and exactly that of one to be simulated from.

    Raises AudioError for the latter if extraction would refuse the file.
    """
    stated_s = stated_duration_s(data)
    if utterance.simulate is None:
        return stated_s
    # A new file has a checksum of its own, so damage is looked for in the given one.
    decoded = decode_utterance(data, utterance.utterance_id, stated_s or 0.0, "kaldi")
    return len(decoded.samples) / SAMPLE_RATE_HZ


def _fault(utterance: KaldiUtterance, name: str) -> _Fault | None:
    """Return the reason not to read the file at all, if there is one."""
    if (num_bytes := len(name.encode())) > MAX_NAME_BYTES:
        detail = f"its object's name has {num_bytes} bytes: need at most {MAX_NAME_BYTES}"
        return _Fault("bad_field", detail)
    if (size := _size_of(utterance.audio_path)) is None:
        detail = f"there is no such file as wav.scp names: {utterance.listed_path!r}"
        return _Fault("missing_object", detail)
    if size > MAX_FILE_BYTES:
        detail = f"{size} bytes: need at most {MAX_FILE_BYTES}, an hour in any format"
        return _Fault("too_large", detail)
    return None


def _size_of(path: Path) -> int | None:
    """Return a readable file's size; None if there is none, as with a name too long for one."""
    try:
        if not path.is_file():
            return None
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except PermissionError as error:
        raise ValueError(f"{path}: permission denied: check its owner and mode") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            return None
        raise


def _row(utterance: KaldiUtterance, key: str, fault: _Fault) -> Quarantined:
    declared_s = utterance.declared_duration_s or 0.0
    duration_ms = round(declared_s * 1000) if declared_s <= MAX_DURATION_S else 0
    return Quarantined(utterance.utterance_id, key, fault.reason, fault.detail, 0, duration_ms)


def _judged(
    stream: Iterable[tuple[KaldiUtterance, AudioFile | Quarantined]],
) -> Iterator[_Kept | Quarantined]:
    """Read the records of one speaker back, in the order of ids."""
    elapsed = timedelta()
    for utterance, file in stream:
        if isinstance(file, Quarantined):
            yield file
            continue
        duration_s = file.duration_s or utterance.declared_duration_s or MIN_DURATION_S
        line = _record(utterance, file.key, duration_s, _EPOCH + elapsed).to_json().encode()
        ((_, record),) = read_records(line, file.key)
        if isinstance(record, Quarantined):
            yield record
            continue
        yield _Kept(utterance.subset, file, record)
        # Without times, a speaker's utterances follow one another from the epoch on.
        elapsed += timedelta(seconds=duration_s)


def _record(
    utterance: KaldiUtterance, key: str, duration_s: float, default_time: datetime
) -> Utterance:
    return Utterance(
        utterance_id=utterance.utterance_id,
        speaker_id=utterance.speaker_id,
        duration_s=round(max(duration_s, MIN_DURATION_S), 6),
        created_at=utterance.created_at or default_time.isoformat(timespec="milliseconds"),
        locale=utterance.locale,
        # Relative, so that a corpus and its digests are the same wherever it lies.
        audio_uri=key,
        text=utterance.text,
        placement=utterance.placement,
        stream=utterance.stream,
    )


def _metadata(records: Mapping[str, Iterable[Utterance]]) -> dict[str, MetadataObject]:
    members: dict[str, list[Utterance]] = defaultdict(list)
    for subset, some in records.items():
        for record in sorted(some, key=stream_order):
            members[f"{METADATA_FOLDER}/{subset}/{_partition(record)}"].append(record)
    return {
        key: MetadataObject(
            "".join(f"{record.to_json()}\n" for record in some).encode(), Tally.of(some)
        )
        for key, some in sorted(members.items())
    }


def _partition(record: Utterance) -> str:
    moment = datetime.fromisoformat(record.created_at)
    with suppress(OverflowError):  # at the calendar's edge its own date serves as well
        moment = moment.astimezone(UTC)
    bucket = _hash(record.speaker_id) % NUM_SPEAKER_BUCKETS
    return f"date={moment.date().isoformat()}/speaker_bucket={bucket:02d}/part-00000.jsonl"


def _hash(name: str) -> int:
    return blake2b(name.encode(), digest_size=1).digest()[0]
