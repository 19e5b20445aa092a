"""Copy a Kaldi data directory into the store as a corpus of audio and metadata."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.log_lines import progress_bar
from infra.prefetch import prefetch
from infra.store.object_store import ObjectInfo, ObjectStore, join_uri, normalize_uri
from jobs.ingestion.kaldi_directory import UNDETERMINED_LOCALE, read_kaldi_directory
from jobs.ingestion.placing import Placing
from jobs.ingestion.planned_corpus import IN_FLIGHT, AudioFile, PlannedCorpus, plan_corpus
from pipeline.records import Quarantined, Tally
from pipeline.runs.manifest import Output, sha256
from pipeline.runs.names import METADATA_FOLDER

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
