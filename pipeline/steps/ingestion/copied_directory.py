"""Copy a Kaldi data directory into the store as a corpus of audio and metadata.

Utterances may first be simulated in placements. The whole corpus is planned before anything is
written: metadata objects, audio files, and ledger rows for what cannot be ingested.
"""

import errno
import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from typing import Any

from infra.log_lines import progress_bar
from infra.prefetch import prefetch
from infra.store.object_store import ObjectInfo, ObjectStore, join_uri, normalize_uri
from pipeline.audio.audio_file import reader_of
from pipeline.audio.codecs import max_padding_samples, stated_duration_s
from pipeline.audio.decode import MAX_DURATION_S as MAX_DECODED_S
from pipeline.audio.decode import (
    decode_audio,
    decode_utterance,
    duration_tolerance,
    max_file_bytes,
)
from pipeline.audio.errors import AudioError
from pipeline.audio.placements import Acoustics, record_flac
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
from pipeline.runs.engine import Loss, LossLimit, StepResult, StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, Output, sha256
from pipeline.runs.names import (
    ALL_SUBSETS,
    AUDIO_FOLDER,
    DEV_SHARE_SETTING,
    INGEST_STEP,
    LEXICON_FILE,
    METADATA_FOLDER,
    SUBSETS,
)
from pipeline.sampling import sampling_priority
from pipeline.steps.ingestion.kaldi_directory import (
    UNDETERMINED_LOCALE,
    KaldiUtterance,
    read_kaldi_directory,
)
from pipeline.steps.ingestion.manifest_records import date_folder
from pipeline.steps.ingestion.placed_audio import Simulation, SubsetChoices

NUM_SPEAKER_BUCKETS = 4
IN_FLIGHT = 16
NO_RECORDS = Tally()
MAX_NAME_BYTES = 255
"""The longest name of a file on Linux."""
MAX_FILE_BYTES = max_file_bytes(float(MAX_DECODED_S))
"""Extraction refuses larger files too; several are in memory at a time."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SUFFIX = re.compile(r"\.[a-z0-9]{1,8}")


@dataclass(frozen=True, slots=True)
class DirectoryIngestion:
    """DirectoryIngestion says which directory is copied, and how its utterances become records.

    `dev_share` is the share of the labelled speakers that become development speakers. `locale` is
    that of speakers without one.
    """

    path: Path
    dev_share: float = 0.0
    locale: str = UNDETERMINED_LOCALE
    simulation: Simulation | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide the corpus beside the directory."""
        # Without one a manifest is as it was before there was one.
        return {
            **(self.simulation.choices.settings if self.simulation else {}),
            **({DEV_SHARE_SETTING: self.dev_share} if self.dev_share else {}),
            **({"locale": self.locale} if self.locale != UNDETERMINED_LOCALE else {}),
        }


@dataclass(frozen=True, slots=True)
class _Sound:
    """_Sound makes the FLAC of an utterance in its placement, in the acoustics of its subset."""

    acoustics: Mapping[str, Acoustics]
    seed: int

    def flac(self, utterance: KaldiUtterance, data: bytes) -> bytes:
        # The id names the placement too, so each version has a room and a noise of its own.
        seed = sampling_priority(self.seed, utterance.utterance_id)
        assert utterance.placement is not None, "it is simulated in one"
        acoustics = self.acoustics[utterance.subset]
        return record_flac(decode_audio(data), utterance.placement, acoustics, seed)


@dataclass(frozen=True, slots=True)
class _Audio:
    """_Audio is an utterance's file as it was read, its key in the corpus and its length if known.

    `sha256` is that of the file; where the utterance is simulated, another one is stored.
    """

    utterance: KaldiUtterance
    key: str
    sha256: str
    duration_s: float | None


@dataclass(frozen=True, slots=True)
class _Copy:
    """_Copy is an utterance that goes into the corpus."""

    audio: _Audio
    record: Utterance


@dataclass(frozen=True, slots=True)
class _Object:
    """_Object is an object of the corpus, and the tally of its records."""

    key: str
    data: bytes
    tally: Tally = NO_RECORDS

    @property
    def output(self) -> Output:
        tally = self.tally
        size, digest = len(self.data), sha256(self.data)
        return Output(self.key, size, digest, tally.utterances, tally.duration_ms)


@dataclass(frozen=True, slots=True)
class _Corpus:
    """_Corpus writes the objects of the corpus, and never replaces one."""

    store: ObjectStore
    uri: str
    sound: _Sound | None

    def copy(self, audio: _Audio) -> Output:
        return self.write(self._read(audio))

    def write(self, ours: _Object) -> Output:
        uri = join_uri(self.uri, ours.key)
        if not self.store.put_if_absent(uri, ours.data) and self.store.get(uri) != ours.data:
            raise _other_corpus(uri)
        return ours.output

    def compare(self, audio: _Audio, there: Mapping[str, ObjectInfo]) -> Output:
        uri, ours = join_uri(self.uri, audio.key), self._read(audio)
        if not self._holds(there[uri], ours.data):
            raise _other_corpus(uri)
        return ours.output

    def require_same_metadata(self, metadata: Sequence[_Object]) -> None:
        ours = {join_uri(self.uri, each.key): each.data for each in metadata}
        for info in self.store.list(join_uri(self.uri, METADATA_FOLDER)):
            if info.uri not in ours or not self._holds(info, ours[info.uri]):
                raise _other_corpus(info.uri)

    def _read(self, audio: _Audio) -> _Object:
        """Read what to store; ValueError if the file is no longer the one that was planned with."""
        data = audio.utterance.audio_path.read_bytes()
        if sha256(data) != audio.sha256:
            said = "changed while it was ingested: run the step again"
            raise ValueError(f"{audio.utterance.audio_path}: {said}")
        if audio.utterance.is_simulated:
            assert self.sound is not None, "placements are simulated in drawn acoustics"
            data = self.sound.flac(audio.utterance, data)
        return _Object(audio.key, data)

    def _holds(self, found: ObjectInfo, data: bytes) -> bool:
        """Compare an object with `data`: by its ETag if that is the MD5, or else by its bytes."""
        if found.num_bytes != len(data):
            return False
        md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
        return found.etag == md5 or self.store.get(found.uri) == data


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """PlannedCopy holds what is to be written, and the ledger rows of what is not.

    `num_unlisted` utterances are of speakers that are in no list.
    """

    copies: Sequence[_Copy]
    language_data: Mapping[str, bytes]
    quarantined: Sequence[Quarantined]
    num_unlisted: int
    sound: _Sound | None

    @property
    def records(self) -> dict[str, list[Utterance]]:
        """The records by subset."""
        by_subset: dict[str, list[Utterance]] = {subset: [] for subset in ALL_SUBSETS}
        for each in self.copies:
            by_subset[each.audio.utterance.subset].append(each.record)
        # A corpus without development speakers is as it was before there were any.
        return {s: some for s, some in by_subset.items() if some or s in SUBSETS}

    @property
    def tally_out(self) -> Tally:
        """The utterances that go into the corpus."""
        return Tally.of([each.record for each in self.copies])

    @property
    def tally_in(self) -> Tally:
        """These, and those that are ledger rows."""
        return self.tally_out + Tally.of(self.quarantined)

    @property
    def statistics(self) -> dict[str, Any]:
        """The counts of the step's manifest.

        Unreadable utterances are in the corpus, for extraction to quarantine; unlisted ones are
        not.
        """
        tallies = {subset: Tally.of(some) for subset, some in self.records.items()}
        return {
            "utterances": {subset: each.utterances for subset, each in tallies.items()},
            "hours": {subset: round(each.hours, 4) for subset, each in tallies.items()},
            "unreadable": sum(each.audio.duration_s is None for each in self.copies),
            "unlisted": self.num_unlisted,
        }

    def write(self, store: ObjectStore, corpus_uri: str) -> tuple[Output, ...]:
        """Compare what is there, then write what is not; records last, as they name the audio.

        The lexicon is not copied: it is no input of ingest, and steps that read it have its
        digest. Audio counts no utterance: the metadata objects do. ValueError if `corpus_uri`
        holds another corpus, or a file is no longer the one that was planned with.
        """
        corpus = _Corpus(store, normalize_uri(corpus_uri), self.sound)
        there = {info.uri: info for info in store.list(join_uri(corpus.uri, AUDIO_FOLDER))}
        audio = [each.audio for each in self.copies]
        known = [each for each in audio if join_uri(corpus.uri, each.key) in there]
        new = [each for each in audio if join_uri(corpus.uri, each.key) not in there]
        metadata = _metadata(self.records)
        stored = _each("compare", lambda each: corpus.compare(each, there), known)
        corpus.require_same_metadata(metadata)
        texts = [corpus.write(_Object(*each)) for each in self.language_data.items()]
        stored += _each("copy", corpus.copy, new)
        records = [corpus.write(each) for each in metadata]
        return (*sorted(stored, key=lambda output: output.key), *texts, *records)


def ingest_directory(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    ingestion: DirectoryIngestion,
    loss_budget: float,
) -> StepResult:
    """Copy a directory, unless it was done; LossBudgetExceededError if too much of it is faulty."""
    digests = {
        path.name: sha256(path.read_bytes())
        for path in sorted(ingestion.path.iterdir())
        if path.is_file() and path.suffix != ".ctm" and path.name != LEXICON_FILE
    }

    def make(step: StepRun) -> Manifest:
        planned = plan_copy(ingestion)
        ledger = step.context.put_ledger(INGEST_STEP, planned.quarantined)
        if ledger:
            limit = LossLimit(loss_budget, planned.tally_in.utterances)
            loss = Loss(INGEST_STEP, Counter(ledger.reasons), ledger.key)
            limit.check(loss.num_lost, loss)
        return step.manifest(
            outputs=planned.write(store, corpus_uri),
            tally_in=planned.tally_in,
            tally_out=planned.tally_out,
            ledgers=(ledger,) if ledger else (),
            quarantined=Tally.of(planned.quarantined),
            statistics=planned.statistics,
        )

    engines = ingestion.simulation.engines if ingestion.simulation else ()
    spec = StepSpec(
        store, run_uri, INGEST_STEP, ingestion.settings, digests=digests, engines=engines
    )
    return run_step(spec, make)


def plan_copy(ingestion: DirectoryIngestion) -> PlannedCopy:
    """Read all audio, make all records, and read each record as selection will.

    With a simulation, each utterance is stored once for each of its placements. Durations are the
    files' own; those of unreadable files are utt2dur's, or else 1 ms. Without utt2time, a speaker's
    utterances follow one another from 1970-01-01, by id. An absent file, a record that its reader
    refuses, and audio of which no placement can be simulated make ledger rows. ValueError for a
    fault in the directory.
    """
    directory = read_kaldi_directory(ingestion.path, ingestion.dev_share, ingestion.locale)
    utterances, sound = directory.utterances, None
    if simulation := ingestion.simulation:
        utterances = tuple(versions(utterances, simulation.choices))
        drawn = simulation.draw({each.subset for each in utterances if each.is_simulated})
        sound = _Sound(drawn, simulation.choices.seed)
    copies: list[_Copy] = []
    quarantined: list[Quarantined] = []
    looked = prefetch(_look, utterances, IN_FLIGHT)
    progress = progress_bar(looked, description="read", total=len(utterances), unit="utterance")
    for _, of_speaker in groupby(progress, key=lambda pair: pair[0].speaker_id):
        for each in _judged(audio for _, audio in of_speaker):
            if isinstance(each, Quarantined):
                quarantined.append(each)
            else:
                copies.append(each)
    language_data, num_unlisted = directory.language_data, directory.num_unlisted
    return PlannedCopy(copies, language_data, quarantined, num_unlisted, sound)


def versions(
    utterances: Iterable[KaldiUtterance], choices: SubsetChoices
) -> Iterator[KaldiUtterance]:
    """Yield each utterance once a placement, under an id of its own.

    Speakers keep their ids, so that a speaker is in one subset. Each placement is a stream of its
    own, as the device stays there. ValueError where the directory has placements itself.
    """
    for each in utterances:
        if each.placement is not None:
            remedy = "remove utt2placement, or ingest without --placements"
            said = f"{each.utterance_id} is in a placement already"
            raise ValueError(f"utt2placement: {said}: {remedy}")
        for name in choices.of(each.subset, each.utterance_id):
            # No two versions share an id, as each ends with one of the names after its own.
            yield replace(
                each,
                utterance_id=version_id(each.utterance_id, name),
                placement=name,
                stream=name,
                is_simulated=name != CLEAN,
            )


def _look(utterance: KaldiUtterance) -> _Audio | Quarantined:
    """Read an utterance's file; what cannot be stored, or not simulated from, is a ledger row."""
    suffix = ".flac" if utterance.is_simulated else utterance.audio_path.suffix.lower()
    name = f"{utterance.utterance_id}{suffix if _SUFFIX.fullmatch(suffix) else ''}"
    # S3 limits the rate of requests by prefix, so the hash comes early in the key.
    key = f"{AUDIO_FOLDER}/{_hash(utterance.utterance_id):02x}/{name}"
    if (row := _unread(utterance, key, name)) is not None:
        return row
    data = utterance.audio_path.read_bytes()
    try:
        duration_s = _duration_s(utterance, data)
    except AudioError as error:
        return _row(utterance, key, error.reason, error.detail)
    if duration_s is None or duration_s > MAX_DURATION_S:
        return _Audio(utterance, key, sha256(data), None)
    declared_s = utterance.declared_duration_s or duration_s
    missing_s, surplus_s = duration_tolerance(declared_s, max_padding_samples(SAMPLE_RATE_HZ))
    if not -missing_s <= duration_s - declared_s <= surplus_s:
        detail = f"the file lasts {duration_s:.3f} s, utt2dur says {declared_s:.3f} s"
        return _row(utterance, key, "duration_mismatch", detail)
    return _Audio(utterance, key, sha256(data), duration_s)


def _unread(utterance: KaldiUtterance, key: str, name: str) -> Quarantined | None:
    """Make the ledger row of a file that is not read at all; None if it is to be read."""
    if (num_bytes := len(name.encode())) > MAX_NAME_BYTES:
        detail = f"its object's name has {num_bytes} bytes: need at most {MAX_NAME_BYTES}"
        return _row(utterance, key, "bad_field", detail)
    if (size := _size_of(utterance.audio_path)) is None:
        detail = f"there is no such file as wav.scp names: {utterance.listed_path!r}"
        return _row(utterance, key, "missing_object", detail)
    if size > MAX_FILE_BYTES:
        detail = f"{size} bytes: need at most {MAX_FILE_BYTES}, an hour in any format"
        return _row(utterance, key, "too_large", detail)
    return None


def _duration_s(utterance: KaldiUtterance, data: bytes) -> float | None:
    """Return the length that a file states, and exactly that of one to be simulated from.

    Raises AudioError for the latter if extraction would refuse the file.
    """
    stated_s = stated_duration_s(reader_of(data), len(data))
    if not utterance.is_simulated:
        return stated_s
    # A new file has a checksum of its own, so damage is looked for in the given one.
    decoded = decode_utterance(data, utterance.utterance_id, stated_s or 0.0, "kaldi")
    return len(decoded.samples) / SAMPLE_RATE_HZ


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


def _row(utterance: KaldiUtterance, key: str, reason: str, detail: str) -> Quarantined:
    declared_s = utterance.declared_duration_s or 0.0
    duration_ms = round(declared_s * 1000) if declared_s <= MAX_DURATION_S else 0
    return Quarantined(utterance.utterance_id, key, reason, detail, 0, duration_ms)


def _judged(of_speaker: Iterable[_Audio | Quarantined]) -> Iterator[_Copy | Quarantined]:
    """Make the records of one speaker, in the order of ids, and read each as selection will."""
    elapsed = timedelta()
    for audio in of_speaker:
        if isinstance(audio, Quarantined):
            yield audio
            continue
        declared_s = audio.utterance.declared_duration_s
        duration_s = audio.duration_s or declared_s or MIN_DURATION_S
        line = _record(audio, duration_s, _EPOCH + elapsed).to_json().encode()
        ((_, record),) = read_records(line, audio.key)
        if isinstance(record, Quarantined):
            yield record
            continue
        yield _Copy(audio, record)
        # Without times, a speaker's utterances follow one another from the epoch on.
        elapsed += timedelta(seconds=duration_s)


def _record(audio: _Audio, duration_s: float, default_time: datetime) -> Utterance:
    utterance = audio.utterance
    return Utterance(
        utterance_id=utterance.utterance_id,
        speaker_id=utterance.speaker_id,
        duration_s=round(max(duration_s, MIN_DURATION_S), 6),
        created_at=utterance.created_at or default_time.isoformat(timespec="milliseconds"),
        locale=utterance.locale,
        # Relative, so that a corpus and its digests are the same wherever it lies.
        audio_uri=audio.key,
        text=utterance.text,
        placement=utterance.placement,
        stream=utterance.stream,
    )


def _metadata(records: Mapping[str, Iterable[Utterance]]) -> list[_Object]:
    members: dict[str, list[Utterance]] = defaultdict(list)
    for subset, some in records.items():
        for record in sorted(some, key=stream_order):
            bucket = f"speaker_bucket={_hash(record.speaker_id) % NUM_SPEAKER_BUCKETS:02d}"
            folder = f"{METADATA_FOLDER}/{subset}/{date_folder(record)}/{bucket}"
            members[f"{folder}/part-00000.jsonl"].append(record)
    return [
        _Object(key, "".join(f"{record.to_json()}\n" for record in some).encode(), Tally.of(some))
        for key, some in sorted(members.items())
    ]


def _hash(name: str) -> int:
    return blake2b(name.encode(), digest_size=1).digest()[0]


def _each(verb: str, function: Callable[[_Audio], Output], audio: Sequence[_Audio]) -> list[Output]:
    done = prefetch(function, audio, IN_FLIGHT)
    seen = progress_bar(done, description=verb, total=len(audio), unit="file")
    return [output for _, output in seen]


def _other_corpus(uri: str) -> ValueError:
    remedy = "use another corpus URI, or remove the corpus there"
    return ValueError(f"{uri} is from another corpus than this data directory: {remedy}")
