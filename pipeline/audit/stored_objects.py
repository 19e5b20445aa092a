"""Read every object that manifests and records name: its size, its digest, its utterances.

Ids and declared milliseconds are read without tensors. Hashes of the ids that a step's objects hold
lie on local disk, and are compared range by range.
"""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BufferedRandom
from typing import Any

import numpy as np
from jaxtyping import Bool, Shaped, UInt32, UInt64

from infra.prefetch import prefetch
from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri
from infra.store.uris import resolve_audio
from pipeline.audit.step_records import Finding, StepRecords
from pipeline.records import parse_utterance
from pipeline.runs.engine import Distribute
from pipeline.runs.ledger import QUARANTINED, read_lines
from pipeline.runs.manifest import Output, read_output, sha256
from pipeline.runs.names import AUDIO_FOLDER, INGEST_STEP, LEDGER_SUFFIX
from pipeline.sampling import hash_name
from pipeline.shards.container import read_plain_columns
from pipeline.steps.hash_ranges import is_among, range_edges

Hashes = UInt64[np.ndarray, " _names"]


@dataclass(frozen=True, slots=True)
class AudioVersion:
    """AudioVersion is the audio that a feature row was made of: its URI, and its ETag then.

    The ETag of a part, as a shard writes it, is of the part's bytes alone.
    """

    uri: str
    etag: str
    part: str | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """An object's utterances, in stored order; target shards do not repeat the durations.

    Selection files hold speakers too, feature shards the audio that extraction read, and ledgers
    reasons.
    """

    utterance_ids: list[str]
    duration_ms: int | None
    speaker_ids: tuple[str, ...] = ()
    audio: tuple[AudioVersion, ...] = ()
    reasons: Mapping[str, int] = field(default_factory=dict)


def hash_names(names: Sequence[str]) -> Hashes:
    """Hash each name to 64 bits: a billion utterances are 8 GB."""
    return np.array([hash_name(each) for each in names], np.uint64)


def read_contents(key: str, data: bytes) -> Contents | None:
    """Read the utterances of the object at `key`; None for an object without, such as a model.

    ValueError for bytes in another format than the key's suffix states.
    """
    if key.endswith(LEDGER_SUFFIX):
        rows = list(read_lines(data, QUARANTINED))
        ids = [row["utterance_id"] for row in rows]
        duration_ms = sum(row["duration_ms"] for row in rows)
        return Contents(ids, duration_ms, reasons=Counter(row["reason"] for row in rows))
    if key.endswith(".jsonl"):
        utterances = [parse_utterance(line.decode()) for line in data.splitlines()]
        ids = [utterance.utterance_id for utterance in utterances]
        speakers = dict.fromkeys(utterance.speaker_id for utterance in utterances)
        return Contents(ids, sum(each.duration_ms for each in utterances), tuple(speakers))
    if key.endswith(".parquet"):
        names = ("utterance_id", "duration_ms", "audio_uri", "audio_etag", "audio_part")
        columns, _ = read_plain_columns(data, names)
        durations_ms = columns.get("duration_ms")
        total_ms = None if durations_ms is None else sum(durations_ms)
        uris, etags = columns.get("audio_uri", []), columns.get("audio_etag", [])
        parts = columns.get("audio_part", [None] * len(uris))
        audio = tuple(map(AudioVersion, uris, etags, parts))
        return Contents(columns["utterance_id"], total_ms, audio=audio)
    return None


_ROW = np.dtype([("hash", "<u8"), ("place", "<u4")])
Rows = Shaped[np.ndarray, " names"]
"""Hashes, each with the place of its object."""

ROWS_IN_MEMORY = 2**20
"""More names than these are sorted, and written to the temporary folder, 12 bytes a name."""

ROWS_A_RANGE = 2**22
"""Comparisons hold about so many names of a step at a time, some 100 MB."""


@dataclass(frozen=True, slots=True)
class NameRange:
    """NameRange holds hashes by rising value, and by each the place of the object that names it."""

    hashes: UInt64[np.ndarray, " names"]
    places: UInt32[np.ndarray, " names"]

    @classmethod
    def joined(cls, *parts: "NameRange") -> "NameRange":
        """Sort the names of all parts by hash."""
        hashes = np.concatenate([np.empty(0, np.uint64), *(part.hashes for part in parts)])
        places = np.concatenate([np.empty(0, np.uint32), *(part.places for part in parts)])
        order = np.argsort(hashes, kind="stable")
        return cls(hashes[order], places[order])

    def those(self, is_wanted: Bool[np.ndarray, " names"]) -> "NameRange":
        """Return the names that are wanted."""
        return NameRange(self.hashes[is_wanted], self.places[is_wanted])


@dataclass(slots=True)
class HashedNames:
    """HashedNames holds a hash of each name, and the place of its object among those of a step.

    Up to ROWS_IN_MEMORY are in memory. A billion names are 12 GB in the temporary folder.
    """

    _recent: list[Rows] = field(default_factory=list)
    _num_recent: int = 0
    _file: BufferedRandom | None = None
    _run_lengths: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        """Count the names, each as often as it was added."""
        return sum(self._run_lengths) + self._num_recent

    def add(self, hashes: Hashes, place: int = 0) -> None:
        """Add the names of the object at `place`."""
        rows = np.empty(len(hashes), _ROW)
        rows["hash"], rows["place"] = hashes, place
        self._recent.append(rows)
        self._num_recent += len(rows)
        if self._num_recent > ROWS_IN_MEMORY:
            # Without a name in the folder: it is gone when the process ends, however it ends.
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115 - kept open
            self._file.write(self._sorted_recent().tobytes())
            self._run_lengths.append(self._num_recent)
            self._recent, self._num_recent = [], 0

    def clear(self) -> None:
        """Forget all names."""
        self._recent, self._num_recent, self._run_lengths, self._file = [], 0, [], None

    def _sorted_recent(self) -> Rows:
        rows = np.concatenate([np.empty(0, _ROW), *self._recent])
        return rows[np.argsort(rows["hash"], kind="stable")]

    def _sorted_runs(self) -> list[Rows]:
        self._recent = [self._sorted_recent()]
        if self._file is None:
            return self._recent
        self._file.flush()
        stored = np.memmap(self._file, _ROW, "r")
        return [*np.split(stored, np.cumsum(self._run_lengths)[:-1]), *self._recent]

    def ranges(self, num_ranges: int) -> Iterator[NameRange]:
        """Cut the hashes into ranges of equal width, the same ones for all names; yield each."""
        runs = self._sorted_runs()
        edges = [range_edges(run["hash"], num_ranges) for run in runs]
        for number in range(num_ranges):
            cuts = [slice(*each[number : number + 2].tolist()) for each in edges]
            rows = [run[cut] for run, cut in zip(runs, cuts, strict=True)]
            yield NameRange.joined(*(NameRange(each["hash"], each["place"]) for each in rows))

    def hold(self, hashes: Hashes) -> Bool[np.ndarray, " names"]:
        """Return for each hash whether it is here."""
        is_here = np.zeros(len(hashes), bool)
        for run in self._sorted_runs():
            is_here |= is_among(hashes, run["hash"])
        return is_here


def num_ranges_of(*names: HashedNames) -> int:
    """Return the number of ranges in which these can be compared, ROWS_A_RANGE at a time."""
    return -(-max(map(len, names), default=0) // ROWS_A_RANGE) or 1


GETS_IN_FLIGHT = 8
"""Shards of 100 MB in memory at a time."""

_CHECKPOINTS_IN_FLIGHT = 2
"""Checkpoints of 1 GB in memory at a time."""

GROUP_BYTES, GROUP_OBJECTS = 2**30, 1_000
"""A task reads at most so much, 3 s on one core, and returns 1 MB of hashes."""

GROUPS_AT_A_TIME = 200
"""The driver receives the hashes of so many groups at a time."""


@dataclass(frozen=True, slots=True)
class Holding:
    """Holding holds hashes of what a step's `outputs` hold, each with the place of its object.

    These are the utterances of outputs and ledgers, the speakers of selection files, and the
    versions of the audio that feature shards were made of, or that was read just now. `folders`
    are those of the audio.
    """

    outputs: list[Output] = field(default_factory=list)
    written: HashedNames = field(default_factory=HashedNames)
    quarantined: HashedNames = field(default_factory=HashedNames)
    speakers: HashedNames = field(default_factory=HashedNames)
    audio: HashedNames = field(default_factory=HashedNames)
    folders: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class SealedRecord:
    """SealedRecord is a record as it is stored, and the objects below the run that it names."""

    key: str
    document: Mapping[str, Any]
    objects: tuple[Output, ...]
    remedy: str


@dataclass(frozen=True, slots=True)
class _Hashed:
    """Hashes of the utterances, speakers and audio versions of one object, and audio's folders."""

    utterances: Hashes
    speakers: Hashes
    audio: Hashes
    folders: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Read:
    """The result of reading one object: its contents, its damage, or its wrong counts."""

    hashed: _Hashed | None = None
    damage: str = ""
    miscount: str = ""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """An object to read: where it lies, and whether it holds utterances."""

    output: Output
    base: str
    has_utterances: bool


@dataclass(frozen=True, slots=True)
class Reader:
    """Reader reads the objects of a run and its corpus, and reports each one's bytes.

    Without `distribute` this process reads them, else tasks do; what is found is the same.
    """

    store: ObjectStore
    run_uri: str
    corpus_uri: str
    progress: Callable[[int], None]
    distribute: Distribute | None = None

    def read_step(
        self, records: StepRecords, outputs: Sequence[Output]
    ) -> tuple[Holding | None, list[Finding]]:
        """Read `outputs` of a step, which its manifest names.

        The holding is None where an object cannot be read, as its utterances are unknown.
        """
        holding, findings, is_whole = Holding(), [], True
        wanted = [_Wanted(o, self._base(records, o), records.has_tasks) for o in outputs]
        for output, found in self._read(wanted, GETS_IN_FLIGHT):
            self.progress(output.num_bytes)
            where = self.name_of(records, output)
            if found.damage:
                is_whole = False
                findings.append(_damaged(where, output, found, records.remedy(output.key)))
            if found.miscount:
                expected = _counts(output)
                remedy = records.remedy(output.key)
                findings.append(Finding(where, expected, found.miscount, remedy))
            if found.hashed is not None:
                _hold(holding, output, found.hashed)
        return holding if is_whole else None, findings

    def read_named(self, named: Mapping[Output, SealedRecord]) -> Iterator[Finding]:
        """Read objects below the run that records name."""
        wanted = [_Wanted(output, self.run_uri, has_utterances=False) for output in named]
        for output, found in self._read(wanted, _CHECKPOINTS_IN_FLIGHT):
            self.progress(output.num_bytes)
            # A training at work removes an outdated checkpoint's record before its objects.
            if found.damage and self.store.exists(join_uri(self.run_uri, named[output].key)):
                yield _damaged(output.key, output, found, named[output].remedy)

    def name_of(self, records: StepRecords, output: Output) -> str:
        """Return an object's key below the run, or its URI if it is the corpus's."""
        base = self._base(records, output)
        return output.key if base == self.run_uri else join_uri(base, output.key)

    def _base(self, records: StepRecords, output: Output) -> str:
        # The outputs of ingest are the corpus's, its ledger is the run's.
        is_corpus = records.step == INGEST_STEP and not output.key.endswith(LEDGER_SUFFIX)
        return self.corpus_uri if is_corpus else self.run_uri

    def _read(self, wanted: Sequence[_Wanted], in_flight: int) -> Iterator[tuple[Output, _Read]]:
        """Read objects, and yield them in their order."""
        place = _Place(self.store, self.run_uri, self.corpus_uri)
        if self.distribute is None:
            # Digests and ids are made where the objects arrive, in as many threads.
            for each, found in prefetch(place.check, wanted, in_flight):
                yield each.output, found
            return
        groups = [_Group(place, some, in_flight) for some in _cut(wanted)]
        for first in range(0, len(groups), GROUPS_AT_A_TIME):
            some_groups = groups[first : first + GROUPS_AT_A_TIME]
            for group, reads in zip(
                some_groups, self.distribute(some_groups, _read_group, "verify"), strict=True
            ):
                for each, found in zip(group.wanted, reads, strict=True):
                    yield each.output, found


@dataclass(frozen=True, slots=True)
class _Place:
    """The run and the corpus in which objects are read, by this process or by a task."""

    store: ObjectStore
    run_uri: str
    corpus_uri: str

    def check(self, wanted: _Wanted) -> _Read:
        """Read an object, and compare it with what names it."""
        output, base = wanted.output, wanted.base
        try:
            data = self.store.get(join_uri(base, output.key))
        except ObjectNotFound:
            return _Read(damage="missing")
        digest = sha256(data)
        there = f"{len(data):,} bytes, SHA-256 {digest[:16]}"
        try:
            if digest != output.sha256:
                # Again: the network may have damaged it.
                data = read_output(self.store, base, output)
            contents = read_contents(output.key, data) if wanted.has_utterances else None
        except ValueError as error:
            return _Read(damage=f"{there} ({str(error)[:200]})")
        if contents is None:
            is_audio = base != self.run_uri and output.key.startswith(f"{AUDIO_FOLDER}/")
            return _Read(self._hash_audio(output.key, data) if is_audio else None)
        # Target shards do not repeat the durations.
        duration_ms = output.duration_ms if contents.duration_ms is None else contents.duration_ms
        found = replace(
            output,
            utterances=len(contents.utterance_ids),
            duration_ms=duration_ms,
            # A record of an older version does not count them.
            reasons=contents.reasons if output.reasons else {},
        )
        return _Read(self._hash(contents), miscount="" if found == output else _counts(found))

    def _hash(self, contents: Contents) -> _Hashed:
        known = [each for each in contents.audio if each.etag]
        audio = [version_name(self.corpus_uri, each) for each in known]
        return _Hashed(
            hash_names(contents.utterance_ids),
            hash_names(contents.speaker_ids),
            hash_names(audio),
            frozenset(resolve_audio(self.corpus_uri, a.uri).rpartition("/")[0] for a in known),
        )

    def _hash_audio(self, key: str, data: bytes) -> _Hashed:
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        name = version_name(self.corpus_uri, AudioVersion(key, etag))
        return _Hashed(hash_names([]), hash_names([]), hash_names([name]), frozenset())


@dataclass(frozen=True, slots=True)
class _Group:
    """Consecutive objects that one task reads."""

    place: _Place
    wanted: Sequence[_Wanted]
    in_flight: int


def _read_group(group: _Group) -> list[_Read]:
    return [found for _, found in prefetch(group.place.check, group.wanted, group.in_flight)]


def _cut(wanted: Sequence[_Wanted]) -> Iterator[Sequence[_Wanted]]:
    """Cut objects into groups of at most GROUP_BYTES and GROUP_OBJECTS, or of one object."""
    first, num_bytes = 0, 0
    for place, each in enumerate(wanted):
        num_bytes += each.output.num_bytes
        if place > first and (num_bytes > GROUP_BYTES or place - first == GROUP_OBJECTS):
            yield wanted[first:place]
            first, num_bytes = place, each.output.num_bytes
    if wanted:
        yield wanted[first:]


def version_name(corpus_uri: str, audio: AudioVersion) -> str:
    """Name the bytes of an audio object at its place."""
    return f"{resolve_audio(corpus_uri, audio.uri)} {audio.etag}"


def _hold(holding: Holding, output: Output, hashed: _Hashed) -> None:
    place = len(holding.outputs)
    holding.outputs.append(output)
    is_ledger = output.key.endswith(LEDGER_SUFFIX)
    (holding.quarantined if is_ledger else holding.written).add(hashed.utterances, place)
    holding.speakers.add(hashed.speakers, place)
    holding.audio.add(hashed.audio, place)
    holding.folders.update(hashed.folders)


def _damaged(where: str, output: Output, found: _Read, remedy: str) -> Finding:
    expected = f"{output.num_bytes:,} bytes, SHA-256 {output.sha256[:16]}"
    return Finding(where, expected, found.damage, remedy)


def _counts(output: Output) -> str:
    reasons = "".join(f", {count:,} {reason}" for reason, count in sorted(output.reasons.items()))
    return f"{output.utterances:,} utterances, {output.duration_ms:,} ms{reasons}"
