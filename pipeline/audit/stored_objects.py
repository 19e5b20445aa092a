"""Read every object that manifests and records name: its size, its digest, its utterances."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from infra.prefetch import prefetch
from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri
from infra.store.uris import resolve_audio
from pipeline.audit.contents import AudioVersion, Contents, Hashes, hash_names, read_contents
from pipeline.audit.hashed_names import HashedNames
from pipeline.audit.step_records import Finding, StepRecords
from pipeline.runs.manifest import Output, read_output, sha256
from pipeline.runs.names import AUDIO_FOLDER, INGEST_STEP, LEDGER_SUFFIX
from pipeline.runs.step import Distribute

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
        wanted = [_Wanted(o, self._base(records, o), records.is_planned) for o in outputs]
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
