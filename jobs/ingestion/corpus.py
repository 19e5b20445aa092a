"""Copy a Kaldi data directory into the store as a corpus of audio and metadata.

Utterances may first be simulated in placements. The whole corpus is planned before anything is
written: metadata objects, audio files, and ledger rows for what cannot be ingested.
"""

import errno
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import blake2b
from itertools import groupby
from pathlib import Path

from infra.log_lines import progress_bar
from infra.prefetch import prefetch
from infra.settings import Seed, check_ranges
from infra.store.object_store import ObjectInfo, ObjectStore, join_uri, normalize_uri
from jobs.ingestion.kaldi_directory import (
    UNDETERMINED_LOCALE,
    KaldiDirectory,
    KaldiUtterance,
    read_kaldi_directory,
)
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
    CLEAN,
    MAX_DURATION_S,
    MIN_DURATION_S,
    Quarantined,
    Tally,
    Utterance,
    stream_order,
    version_id,
)
from pipeline.runs.manifest import Output, sha256
from pipeline.runs.names import ALL_SUBSETS, METADATA_FOLDER, SUBSETS
from pipeline.steps.ingestion.placed_audio import PlacementChoice, SubsetChoices

Simulate = Callable[[KaldiUtterance, bytes], bytes]
"""Makes the FLAC of an utterance in its placement from the bytes of its audio file."""


@dataclass(frozen=True, slots=True)
class Placing:
    """Placing chooses placements for each subset and simulates them."""

    training: PlacementChoice
    heldout: PlacementChoice
    seed: Seed
    simulate: Simulate

    __post_init__ = check_ranges

    @property
    def choices(self) -> SubsetChoices:
        """The placements by subset, without what simulates them."""
        return SubsetChoices(self.training, self.heldout, self.seed)

    def place(self, directory: KaldiDirectory) -> KaldiDirectory:
        """Return the directory with each utterance once a placement, under an id of its own.

        Speakers keep their ids, so that a speaker is in one subset. Each placement is a stream of
        its own, as the device stays there. ValueError where the directory has placements itself.
        """
        placed = [each.utterance_id for each in directory.utterances if each.placement is not None]
        if placed:
            remedy = "remove utt2placement, or ingest without --placements"
            raise ValueError(f"utt2placement: {placed[0]} is in a placement already: {remedy}")
        versions = [
            self._version(utterance, name)
            for utterance in directory.utterances
            for name in self.choices.of(utterance.subset, utterance.utterance_id)
        ]
        return replace(directory, utterances=tuple(versions))

    def _version(self, utterance: KaldiUtterance, name: str) -> KaldiUtterance:
        # No two versions share an id, as each ends with one of the names after its own.
        key = version_id(utterance.utterance_id, name)
        version = replace(utterance, utterance_id=key, placement=name, stream=name)
        if name == CLEAN:
            return version
        return replace(version, simulate=partial(self.simulate, version))


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


Judge = Callable[[Sequence[Quarantined], Tally], None]
"""Receives the ledger rows and the tally of all utterances before anything is written."""


@dataclass(frozen=True)
class IngestedCorpus:
    """IngestedCorpus counts the contents of the corpus by subset, and lists its objects.

    `unreadable` utterances are in the corpus, for extraction to quarantine; `unlisted` ones,
    whose speakers are in no list, are not. `new_objects` is 0 when the corpus was complete.
    Audio counts no utterance: the metadata objects do.
    """

    utterances: Mapping[str, int]
    hours: Mapping[str, float]
    unreadable: int
    unlisted: int
    new_objects: int
    outputs: tuple[Output, ...]
    quarantined: tuple[Quarantined, ...]


def ingest(
    kaldi_dir: Path,
    store: ObjectStore,
    corpus_uri: str,
    judge: Judge = lambda *_: None,
    placing: Placing | None = None,
    dev_share: float = 0.0,
    locale: str = UNDETERMINED_LOCALE,
) -> IngestedCorpus:
    """Copy the data directory to `corpus_uri`, audio byte for byte; existing objects are kept.

    The lexicon is not copied: it is no input of ingest, and steps that read it have its digest.
    With `placing`, each utterance is stored once for each of its placements.

    Durations are the files' own; those of unreadable files are utt2dur's, or else 1 ms. Without
    utt2time, a speaker's utterances follow one another from 1970-01-01, by id. Nothing is written
    before the metadata's own reader has read every record, and `judge` has seen the ledger rows.
    Raises ValueError for a fault in the directory, or if `corpus_uri` holds another corpus.
    """
    directory = read_kaldi_directory(kaldi_dir, dev_share, locale)
    if placing is not None:
        directory = placing.place(directory)
    planned = plan_corpus(directory)
    tally = sum(planned.tallies.values(), Tally())
    judge(planned.quarantined, tally + Tally.of(planned.quarantined))
    corpus = _Corpus(store, normalize_uri(corpus_uri))
    outputs = corpus.write(planned)
    return IngestedCorpus(
        utterances={subset: each.utterances for subset, each in planned.tallies.items()},
        hours={subset: round(each.hours, 4) for subset, each in planned.tallies.items()},
        unreadable=sum(file.duration_s is None for file in planned.audio),
        unlisted=directory.num_unlisted,
        new_objects=len(corpus.new_uris),
        outputs=outputs,
        quarantined=planned.quarantined,
    )


class _Corpus:
    """_Corpus writes the objects of the corpus, lists the new ones, and never replaces one."""

    def __init__(self, store: ObjectStore, uri: str) -> None:
        self._store, self._uri = store, uri
        self.new_uris: list[str] = []

    def write(self, planned: PlannedCorpus) -> tuple[Output, ...]:
        """Compare what is there, then write what is not; records last, as they name the audio."""
        listing = self._store.list(join_uri(self._uri, "audio"))
        there = {info.uri: info for info in listing}
        known = [file for file in planned.audio if join_uri(self._uri, file.key) in there]
        new = [file for file in planned.audio if join_uri(self._uri, file.key) not in there]
        audio = self._each("compare", lambda file: self._compare(file, there), known)
        self._require_same_metadata(planned)
        texts = planned.language_data.items()
        written = [self._write_once(name, data, Tally()) for name, data in texts]
        audio += self._each("copy", self._copy, new)
        metadata = [
            self._write_once(key, each.data, each.tally) for key, each in planned.metadata.items()
        ]
        return (*sorted(audio, key=lambda output: output.key), *written, *metadata)

    def _each(
        self, verb: str, function: Callable[[AudioFile], Output], files: Sequence[AudioFile]
    ) -> list[Output]:
        done = prefetch(function, files, IN_FLIGHT)
        seen = progress_bar(done, description=verb, total=len(files), unit="file")
        return [output for _, output in seen]

    def _compare(self, file: AudioFile, there: Mapping[str, ObjectInfo]) -> Output:
        uri, data = join_uri(self._uri, file.key), file.read()
        if not self._holds(there[uri], data):
            raise _other_corpus(uri)
        return Output(file.key, len(data), sha256(data), 0, 0)

    def _copy(self, file: AudioFile) -> Output:
        return self._write_once(file.key, file.read(), Tally())

    def _require_same_metadata(self, planned: PlannedCorpus) -> None:
        ours = {join_uri(self._uri, key): each.data for key, each in planned.metadata.items()}
        for info in self._store.list(join_uri(self._uri, METADATA_FOLDER)):
            if info.uri not in ours or not self._holds(info, ours[info.uri]):
                raise _other_corpus(info.uri)

    def _write_once(self, key: str, data: bytes, tally: Tally) -> Output:
        uri = join_uri(self._uri, key)
        if self._store.put_if_absent(uri, data):
            self.new_uris.append(uri)
        elif self._store.get(uri) != data:
            raise _other_corpus(uri)
        return Output(key, len(data), sha256(data), tally.utterances, tally.duration_ms)

    def _holds(self, found: ObjectInfo, data: bytes) -> bool:
        """Compare an object with `data`: by its ETag if that is the MD5, or else by its bytes."""
        if found.num_bytes != len(data):
            return False
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return found.etag == md5 or self._store.get(found.uri) == data


def _other_corpus(uri: str) -> ValueError:
    remedy = "use another corpus URI, or remove the corpus there"
    return ValueError(f"{uri} is from another corpus than this data directory: {remedy}")
