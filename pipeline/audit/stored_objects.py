"""Read the objects that manifests and records name: their sizes, digests and utterances.

Ids and declared milliseconds are read without tensors, and hashed.
"""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from infra.prefetch import prefetch
from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri
from infra.store.uris import resolve_audio
from pipeline.audit.hashed_names import HashedNames, Hashes
from pipeline.packing import runs_by_bytes
from pipeline.records import parse_utterance
from pipeline.runs.engine import Distribute
from pipeline.runs.ledger import QUARANTINED, read_lines
from pipeline.runs.manifest import Output, read_output, sha256
from pipeline.runs.names import AUDIO_FOLDER, LEDGER_SUFFIX
from pipeline.sampling import hash_names
from pipeline.shards.container import read_plain_columns

GROUP_BYTES, GROUP_OBJECTS = 2**30, 1_000
"""A task reads at most so much, 3 s on one core, and returns 1 MB of hashes."""

GROUPS_AT_A_TIME = 200
"""The driver receives the hashes of so many groups at a time."""


@dataclass(frozen=True, slots=True)
class AudioVersion:
    """AudioVersion is the audio that a feature row was made of: its URI, and its ETag then.

    The ETag of a part, as a shard writes it, is of the part's bytes alone.
    """

    uri: str
    etag: str
    part: str | None = None

    def name(self, corpus_uri: str) -> str:
        """Name the bytes of an audio object at its place."""
        return f"{resolve_audio(corpus_uri, self.uri)} {self.etag}"


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


@dataclass(frozen=True, slots=True)
class Wanted:
    """An object to read below `base`: a run or a corpus; and whether it holds utterances."""

    output: Output
    base: str
    has_utterances: bool


@dataclass(frozen=True, slots=True)
class ReadObject:
    """What an object holds, as hashes, and the folders of its audio; its damage, wrong counts."""

    utterances: Hashes = field(default_factory=partial(hash_names, ()))
    speakers: Hashes = field(default_factory=partial(hash_names, ()))
    audio: Hashes = field(default_factory=partial(hash_names, ()))
    folders: frozenset[str] = frozenset()
    damage: str = ""
    miscount: str = ""


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

    def add(self, output: Output, found: ReadObject) -> None:
        """Add what an object holds; one that holds nothing has no place."""
        if not len(found.utterances) + len(found.audio):
            return
        place = len(self.outputs)
        self.outputs.append(output)
        is_ledger = output.key.endswith(LEDGER_SUFFIX)
        (self.quarantined if is_ledger else self.written).add(found.utterances, place)
        self.speakers.add(found.speakers, place)
        self.audio.add(found.audio, place)
        self.folders.update(found.folders)


def read_objects(
    store: ObjectStore,
    corpus_uri: str,
    wanted: Sequence[Wanted],
    in_flight: int,
    distribute: Distribute | None,
) -> Iterator[tuple[Output, ReadObject]]:
    """Read objects, and yield them in their order: tasks read them if there is `distribute`."""
    check = _Check(store, corpus_uri, in_flight)
    if distribute is None:
        # Digests and ids are made where the objects arrive, in as many threads.
        for each, found in prefetch(check.one, wanted, in_flight):
            yield each.output, found
        return
    sizes = [each.output.num_bytes for each in wanted]
    groups = [wanted[run] for run in runs_by_bytes(sizes, GROUP_BYTES, GROUP_OBJECTS)]
    for first in range(0, len(groups), GROUPS_AT_A_TIME):
        some = groups[first : first + GROUPS_AT_A_TIME]
        for group, reads in zip(some, distribute(some, check.all, "verify"), strict=True):
            yield from zip((each.output for each in group), reads, strict=True)


@dataclass(frozen=True, slots=True)
class _Check:
    """Reads objects, in this process or in a task, and compares them with what names them."""

    store: ObjectStore
    corpus_uri: str
    in_flight: int

    def all(self, group: Sequence[Wanted]) -> list[ReadObject]:
        return [found for _, found in prefetch(self.one, group, self.in_flight)]

    def one(self, wanted: Wanted) -> ReadObject:
        output, base = wanted.output, wanted.base
        try:
            data = self.store.get(join_uri(base, output.key))
        except ObjectNotFound:
            return ReadObject(damage="missing")
        digest = sha256(data)
        there = f"{len(data):,} bytes, SHA-256 {digest[:16]}"
        try:
            if digest != output.sha256:
                # Again: the network may have damaged it.
                data = read_output(self.store, base, output)
            contents = read_contents(output.key, data) if wanted.has_utterances else None
        except ValueError as error:
            return ReadObject(damage=f"{there} ({str(error)[:200]})")
        if contents is not None:
            return self._with_counts(output, contents)
        if base == self.corpus_uri and output.key.startswith(f"{AUDIO_FOLDER}/"):
            etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
            return ReadObject(audio=hash_names([AudioVersion(output.key, etag).name(base)]))
        return ReadObject()

    def _with_counts(self, output: Output, contents: Contents) -> ReadObject:
        # Target shards do not repeat the durations.
        duration_ms = output.duration_ms if contents.duration_ms is None else contents.duration_ms
        found = replace(
            output,
            utterances=len(contents.utterance_ids),
            duration_ms=duration_ms,
            reasons=contents.reasons,
        )
        known = [each for each in contents.audio if each.etag]
        uris = (resolve_audio(self.corpus_uri, each.uri) for each in known)
        return ReadObject(
            hash_names(contents.utterance_ids),
            hash_names(contents.speaker_ids),
            hash_names([each.name(self.corpus_uri) for each in known]),
            frozenset(uri.rpartition("/")[0] for uri in uris),
            miscount="" if found == output else counts(found),
        )


def counts(output: Output) -> str:
    """Say how many utterances, milliseconds and reasons an object holds."""
    reasons = "".join(f", {count:,} {reason}" for reason, count in sorted(output.reasons.items()))
    return f"{output.utterances:,} utterances, {output.duration_ms:,} ms{reasons}"
