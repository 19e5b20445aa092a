"""Compare audio as it is with the versions that extraction read."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from jaxtyping import Int64

from infra.prefetch import prefetch
from infra.store.object_store import Fetched, ObjectNotFound, ObjectStore, SizeBound
from infra.store.uris import is_s3, resolve_audio
from pipeline.audio.conversion import ANY_AUDIO
from pipeline.audio.errors import AudioError
from pipeline.audio_parts import part_from_text
from pipeline.audit.contents import AudioVersion, Hashes, hash_names, read_contents
from pipeline.audit.hashed_names import HashedNames, num_ranges_of
from pipeline.audit.step_records import Finding
from pipeline.audit.stored_objects import Holding, version_name
from pipeline.runs.manifest import Output, read_output
from pipeline.runs.names import FEATURES_FOLDER, INGEST_STEP, folder_of
from pipeline.runs.step import Distribute
from pipeline.steps.part_requests import FoundAudio, WantedAudio, read_audio
from pipeline.steps.selection.hash_ranges import is_among

GETS_IN_FLIGHT = 16

LISTS_IN_FLIGHT = 8

SHARDS_AT_A_TIME = 200
"""Tasks read the audio of so many shards, then the driver has their findings."""

MAX_FOLDERS = 10_000
"""Above so many folders of audio, such as one a speaker, the folders above them are listed."""

MAX_NAMED = 100
"""A step's findings name at most so many audio objects; one more counts the others."""

_REMEDY = "put the audio back, or extract again into a new --run"


@dataclass(frozen=True, slots=True)
class _Shard:
    """One feature shard of a step, whose audio is compared."""

    store: ObjectStore
    run_uri: str
    corpus_uri: str
    step: str
    output: Output


@dataclass(frozen=True, slots=True)
class _Changed:
    """Audio objects of a shard that are not as extraction read them: a number, and the first."""

    number: int
    first: tuple[Finding, ...]


def audio_findings(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    holdings: Mapping[str, Holding],
    reads_bytes: bool,
    distribute: Distribute | None = None,
) -> Iterator[Finding]:
    """Yield a finding for each audio object that changed since extraction read it.

    In S3 a listing's ETags confirm most; what they do not confirm is read, and in local folders
    all is. The listings of some folders are in memory at a time. Of segments and members a listing
    confirms none, so that tasks read them, where `distribute` runs tasks.
    """
    features = {step: each for step, each in holdings.items() if folder_of(step) == FEATURES_FOLDER}
    confirmed = holdings[INGEST_STEP].audio if INGEST_STEP in holdings else HashedNames()
    if not reads_bytes:
        folders = {folder for each in features.values() for folder in each.folders}
        to_list = outermost({folder for folder in folders if is_s3(folder)})
        for _, hashes in prefetch(partial(_listed_versions, store), to_list, LISTS_IN_FLIGHT):
            confirmed.add(hashes)
    for step, holding in features.items():
        shards = [_Shard(store, run_uri, corpus_uri, step, each) for each in holding.outputs]
        number = 0
        for found in _each_changed(shards, holding.audio, confirmed, distribute):
            yield from found.first[: max(MAX_NAMED - number, 0)]
            number += found.number
        if number > MAX_NAMED:
            said = f"{number - MAX_NAMED:,} more audio objects are not as {step} read them"
            yield Finding(corpus_uri, "audio as it was", said, _REMEDY)


def _each_changed(
    shards: Sequence[_Shard],
    names: HashedNames,
    confirmed: HashedNames,
    distribute: Distribute | None,
) -> Iterator[_Changed]:
    """Compare the shards with audio that nothing confirms, in their order.

    Where a part of a shard's audio is confirmed, this process knows which.
    """
    num_names, num_doubtful = _names_by_place(names, confirmed, len(shards))
    places = np.flatnonzero(num_doubtful).tolist()
    for first in range(0, len(places), SHARDS_AT_A_TIME):
        some = places[first : first + SHARDS_AT_A_TIME]
        by_tasks = [each for each in some if num_doubtful[each] == num_names[each]]
        found: dict[int, _Changed] = {}
        if distribute is not None and by_tasks:
            asked = [shards[place] for place in by_tasks]
            answers = distribute(asked, _all_changed, "verify audio")
            found = dict(zip(by_tasks, answers, strict=True))
        for place in some:
            yield found[place] if place in found else _changed(shards[place], confirmed)


def _names_by_place(
    names: HashedNames, others: HashedNames, num_places: int
) -> tuple[Int64[np.ndarray, " places"], Int64[np.ndarray, " places"]]:
    """Count the names of each place, and those that are not among the others."""
    every, lacking = np.zeros(num_places, np.int64), np.zeros(num_places, np.int64)
    num_ranges = num_ranges_of(names, others)
    for own, known in zip(names.ranges(num_ranges), others.ranges(num_ranges), strict=True):
        is_lacking = ~is_among(own.hashes, known.hashes)
        every += np.bincount(own.places, minlength=num_places)
        lacking += np.bincount(own.places[is_lacking], minlength=num_places)
    return every, lacking


def outermost(folders: set[str]) -> list[str]:
    """Return the folders in no other one; where there are very many, those that hold them."""
    while len(folders) > MAX_FOLDERS:
        folders = {folder.rpartition("/")[0] for folder in folders}
    kept: list[str] = []
    for folder in sorted(f"{each}/" for each in folders):
        if not kept or not folder.startswith(kept[-1]):
            kept.append(folder)
    return [folder.rstrip("/") for folder in kept]


def _listed_versions(store: ObjectStore, folder: str) -> Hashes:
    versions = (AudioVersion(found.uri, found.etag) for found in store.list(folder))
    return hash_names([version_name(folder, each) for each in versions])


def _all_changed(shard: _Shard) -> _Changed:
    return _changed(shard, HashedNames())


def _changed(shard: _Shard, confirmed: HashedNames) -> _Changed:
    """Read the audio of a shard that is not confirmed, and compare it."""
    store, corpus_uri, output = shard.store, shard.corpus_uri, shard.output
    contents = read_contents(output.key, read_output(store, shard.run_uri, output))
    assert contents is not None, "hashes come from contents"
    known = [each for each in contents.audio if each.etag]
    names = hash_names([version_name(corpus_uri, each) for each in known])
    doubtful = [known[row] for row in np.flatnonzero(~confirmed.hold(names))]
    wanted = [wanted_version(corpus_uri, each) for each in doubtful]
    number, first = 0, list[Finding]()
    for expected, found in zip(doubtful, read_audio(store, wanted, GETS_IN_FLIGHT), strict=True):
        there = _there(found)
        if there != f"ETag {expected.etag}":
            number += 1
            if number <= MAX_NAMED:
                first.append(_finding(shard, expected, there))
    return _Changed(number, tuple(first))


def _finding(shard: _Shard, expected: AudioVersion, there: str) -> Finding:
    uri = resolve_audio(shard.corpus_uri, expected.uri)
    part = f", {expected.part}" if expected.part else ""
    said = f"ETag {expected.etag}{part}, as {shard.step} read it"
    return Finding(uri, said, there, _REMEDY)


def wanted_version(corpus_uri: str, audio: AudioVersion) -> WantedAudio:
    """Say which bytes a feature row was made of."""
    uri, part = resolve_audio(corpus_uri, audio.uri), part_from_text(audio.part)
    return WantedAudio(uri, SizeBound(), part, ANY_AUDIO)


def _there(found: FoundAudio) -> str:
    """Say what is there; any other answer than that is about access, and is raised."""
    if isinstance(found, Fetched):
        return f"ETag {found.etag}"
    if isinstance(found, AudioError):
        return f"{found.reason}: {found.detail}"
    if isinstance(found, ObjectNotFound):
        return "missing"
    raise found
