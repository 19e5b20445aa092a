"""Copy a Kaldi data directory into the store as a corpus of audio, metadata and lexicon."""

import hashlib
import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from pathlib import Path

import soundfile
from tqdm import tqdm

from infra.prefetch import prefetch
from infra.store.object_store import ObjectStore, join_uri, normalize_uri
from jobs.ingestion.kaldi_directory import KaldiUtterance, read_kaldi_directory
from pipeline.records import MAX_DURATION_S, Tally, Utterance, stream_order
from pipeline.runs.names import METADATA_FOLDER, SUBSETS

NUM_SPEAKER_BUCKETS = 4
_IN_FLIGHT = 16
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SHORTEST_S = 0.001


@dataclass(frozen=True)
class IngestSummary:
    """IngestSummary counts the contents of the corpus by subset, and the objects newly added.

    `unreadable` utterances are in the corpus, for extraction to quarantine; `unlisted` ones,
    whose speakers are in no list, are not. `new_objects` is 0 when the corpus was complete.
    """

    utterances: dict[str, int]
    hours: dict[str, float]
    unreadable: int
    unlisted: int
    new_objects: int


def ingest(kaldi_dir: Path, store: ObjectStore, corpus_uri: str) -> IngestSummary:
    """Copy the data directory to `corpus_uri`, audio byte for byte; existing objects are kept.

    Durations are the files' own; those of unreadable files are utt2dur's, or else 1 ms. Without
    utt2time, a speaker's utterances follow one another from 1970-01-01, by id. Raises ValueError
    for a fault in the directory, or if `corpus_uri` holds another corpus.
    """
    directory = read_kaldi_directory(kaldi_dir)
    corpus = _Corpus(store, normalize_uri(corpus_uri))
    headers = corpus.copy_audio(directory.utterances)
    records = {subset: list(_records(directory.utterances, subset, headers)) for subset in SUBSETS}
    corpus.write_once("lexicon.txt", directory.lexicon)
    corpus.write_metadata(records)
    tallies = {subset: Tally.of(some) for subset, some in records.items()}
    return IngestSummary(
        utterances={subset: tally.utterances for subset, tally in tallies.items()},
        hours={subset: round(tally.hours, 4) for subset, tally in tallies.items()},
        unreadable=sum(header.duration_s is None for header in headers.values()),
        unlisted=directory.num_unlisted,
        new_objects=corpus.num_new,
    )


@dataclass(frozen=True, slots=True)
class _Header:
    """_Header holds the key of an utterance's audio, and its length if its header states it."""

    key: str
    duration_s: float | None
    is_new: bool


class _Corpus:
    """_Corpus writes the objects of the corpus into the store and never replaces one."""

    def __init__(self, store: ObjectStore, uri: str) -> None:
        self._store, self._uri = store, uri
        self.num_new = 0

    def copy_audio(self, utterances: Iterable[KaldiUtterance]) -> dict[str, _Header]:
        listing = self._store.list(join_uri(self._uri, "audio"))
        num_bytes_of = {info.uri: info.num_bytes for info in listing}
        some = tuple(utterances)
        copied = prefetch(lambda each: self._copy(each, num_bytes_of), some, _IN_FLIGHT)
        progress = tqdm(copied, "ingest", total=len(some), unit="utterance")
        headers = {utterance.utterance_id: header for utterance, header in progress}
        self.num_new += sum(header.is_new for header in headers.values())
        return headers

    def write_metadata(self, records: Mapping[str, list[Utterance]]) -> None:
        lines: dict[str, list[str]] = defaultdict(list)
        for subset, some in records.items():
            for record in sorted(some, key=stream_order):
                lines[f"{METADATA_FOLDER}/{subset}/{_partition(record)}"].append(
                    record.to_json() + "\n"
                )
        ours = {join_uri(self._uri, key) for key in lines}
        for info in self._store.list(join_uri(self._uri, METADATA_FOLDER)):
            if info.uri not in ours:
                raise _other_corpus(info.uri)
        for key, some_lines in sorted(lines.items()):
            self.write_once(key, "".join(some_lines).encode())

    def write_once(self, key: str, data: bytes) -> None:
        uri = join_uri(self._uri, key)
        if self._store.put_if_absent(uri, data):
            self.num_new += 1
        elif self._store.get(uri) != data:
            raise _other_corpus(uri)

    def _copy(self, utterance: KaldiUtterance, num_bytes_of: Mapping[str, int]) -> _Header:
        key = _audio_key(utterance)
        uri = join_uri(self._uri, key)
        # Compare sizes alone, so that a second run does not read the corpus again.
        if uri in num_bytes_of:
            if num_bytes_of[uri] != utterance.audio_path.stat().st_size:
                raise _other_corpus(uri)
            return _Header(key, _duration_s(utterance.audio_path), is_new=False)
        data = utterance.audio_path.read_bytes()
        is_new = self._store.put_if_absent(uri, data)
        if not is_new and self._store.get(uri) != data:
            raise _other_corpus(uri)
        return _Header(key, _duration_s(io.BytesIO(data)), is_new)


def _records(
    utterances: Iterable[KaldiUtterance], subset: str, headers: Mapping[str, _Header]
) -> Iterator[Utterance]:
    members = (utterance for utterance in utterances if utterance.subset == subset)
    for speaker_id, some in groupby(members, key=lambda utterance: utterance.speaker_id):
        elapsed = timedelta()
        for utterance in some:
            header = headers[utterance.utterance_id]
            duration_s = header.duration_s or utterance.declared_duration_s or _SHORTEST_S
            yield Utterance(
                utterance_id=utterance.utterance_id,
                speaker_id=speaker_id,
                duration_s=round(max(duration_s, _SHORTEST_S), 6),
                # Without times, a speaker's utterances follow one another from the epoch on.
                created_at=utterance.created_at
                or (_EPOCH + elapsed).isoformat(timespec="milliseconds"),
                locale=utterance.locale,
                # Relative, so that a corpus and its digests are the same wherever it lies.
                audio_uri=header.key,
                text=utterance.text,
                placement=utterance.placement,
            )
            elapsed += timedelta(seconds=duration_s)


def _duration_s(file: Path | io.BytesIO) -> float | None:
    try:
        duration_s = float(soundfile.info(file).duration)
    except soundfile.SoundFileError:
        return None
    # A FLAC from a pipe does not state its length; libsndfile then reports 2**63 samples.
    return duration_s if duration_s <= MAX_DURATION_S else None


def _audio_key(utterance: KaldiUtterance) -> str:
    # S3 limits the rate of requests by prefix, so the hash comes early in the key.
    name = f"{utterance.utterance_id}{utterance.audio_path.suffix.lower()}"
    return f"audio/{_hash(utterance.utterance_id):02x}/{name}"


def _partition(record: Utterance) -> str:
    date = datetime.fromisoformat(record.created_at).astimezone(UTC).date()
    bucket = _hash(record.speaker_id) % NUM_SPEAKER_BUCKETS
    return f"date={date.isoformat()}/speaker_bucket={bucket:02d}/part-00000.jsonl"


def _hash(name: str) -> int:
    return hashlib.blake2b(name.encode(), digest_size=1).digest()[0]


def _other_corpus(uri: str) -> ValueError:
    remedy = "use another corpus URI, or remove the corpus there"
    return ValueError(f"{uri} is from another corpus than this data directory: {remedy}")
