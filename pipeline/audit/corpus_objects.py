"""Compare a corpus with what the run's steps read of it: metadata, lexicon, audio."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import numpy as np
from jaxtyping import Int64

from infra.prefetch import prefetch
from infra.settings import read_record
from infra.store.object_store import Fetched, ObjectNotFound, ObjectStore, SizeBound, join_uri
from infra.store.uris import is_s3, resolve_audio
from pipeline.audio.conversion import ANY_AUDIO
from pipeline.audio.errors import AudioError
from pipeline.audit.step_records import Finding, StepRecords
from pipeline.audit.stored_objects import (
    AudioVersion,
    HashedNames,
    Hashes,
    Holding,
    hash_names,
    num_ranges_of,
    read_contents,
    version_name,
)
from pipeline.filters import SelectionFilters
from pipeline.records import part_from_text
from pipeline.runs.engine import Distribute
from pipeline.runs.increment import read_increment
from pipeline.runs.manifest import Manifest, Output, is_finished, read_manifest, read_output, sha256
from pipeline.runs.names import (
    ACOUSTICS_FOLDER,
    AUDIO_FOLDER,
    FEATURES_FOLDER,
    INGEST_STEP,
    LANGUAGE_MODEL_SETTINGS,
    LEXICON_FILE,
    METADATA_FOLDER,
    SELECTION_FOLDER,
    UNLABELLED,
    folder_of,
    selection_step,
)
from pipeline.steps.audio_reads import FoundAudio, WantedAudio, read_audio
from pipeline.steps.hash_ranges import is_among
from pipeline.steps.selection.buckets import is_mark, is_within_dates
from pipeline.steps.selection.id_index import metadata_names
from pipeline.steps.selection.select import metadata_uri

GETS_IN_FLIGHT = 16

_ADDED_FOLDERS = (METADATA_FOLDER, AUDIO_FOLDER, ACOUSTICS_FOLDER)
"""The folders of a corpus to which later increments add objects."""

_GROUP_OBJECTS = 256
"""A task reads so many metadata objects; a million hours have 180,000 of 0.2 MB."""


def corpus_findings(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    finished: Mapping[str, StepRecords],
    distribute: Distribute | None = None,
) -> Iterator[Finding]:
    """Yield a finding for each object of the corpus that is not as the steps read or wrote it.

    Metadata that the run did not read are one only where the corpus is the run's own: to others
    new metadata come, which wait for an increment. Tasks read metadata, where `distribute` runs
    tasks, or else this process.
    """
    grows = not f"{corpus_uri}/".startswith(f"{run_uri.rstrip('/')}/")
    for records in finished.values():
        assert records.manifest is not None, "only finished steps are compared"
        if records.manifest.is_inherited:
            continue  # the base's, where it is verified
        if folder_of(records.step) == SELECTION_FOLDER:
            yield from _metadata_findings(store, corpus_uri, records.manifest, grows, distribute)
        for name, uri in _files_read(corpus_uri, records.manifest).items():
            expected = records.manifest.inputs[name]
            yield from _file_findings(store, uri, expected, records.step)
    ingested = finished[INGEST_STEP].manifest if INGEST_STEP in finished else None
    if ingested is not None:
        earlier = _ingested_before(store, run_uri)
        yield from _ingested_findings(store, corpus_uri, [ingested, *earlier], grows)


def in_doubt(
    store: ObjectStore,
    corpus_uri: str,
    ingested: Sequence[Output],
    holdings: Mapping[str, Holding],
) -> list[Output]:
    """Return the outputs of ingest without the audio whose listed ETag is the one extraction read.

    The ETags of a local listing are no digests, so that no local audio is left out.
    """
    listed = store.list(join_uri(corpus_uri, AUDIO_FOLDER))
    etags = {found.uri: found.etag for found in listed}
    versions = [
        AudioVersion(output.key, etags.get(join_uri(corpus_uri, output.key), ""))
        for output in ingested
    ]
    names = hash_names([version_name(corpus_uri, each) for each in versions])
    is_heard = np.zeros(len(names), bool)
    for holding in holdings.values():
        is_heard |= holding.audio.hold(names)
    return [output for output, found in zip(ingested, is_heard.tolist(), strict=True) if not found]


def _metadata_findings(
    store: ObjectStore,
    corpus_uri: str,
    manifest: Manifest,
    grows: bool,
    distribute: Distribute | None,
) -> Iterator[Finding]:
    step = manifest.step
    inputs = {name: manifest.inputs[name] for name in metadata_names(manifest)}
    base = metadata_uri(corpus_uri, step.rpartition("/")[2])
    uris = [join_uri(base, name) for name in inputs]
    remedy = "put the metadata back, or select again into a new --run"
    digests = _digests(store, uris, f"verify the metadata of {step}", distribute)
    for uri, expected, digest in zip(uris, inputs.values(), digests, strict=True):
        if digest != expected:
            there = f"SHA-256 {digest[:16]}" if digest else "missing"
            yield Finding(uri, f"SHA-256 {expected[:16]}, as selected from", there, remedy)
    if grows:
        return
    known = set(uris)
    prunes = step == selection_step(UNLABELLED) and manifest.config.get("date_folders", False)
    filters = read_record(SelectionFilters, manifest.config.get("filters", {}), "filters")
    for found in store.list(base):
        is_unread = prunes and not is_within_dates(found.uri, filters)
        if found.uri not in known and not is_mark(found) and not is_unread:
            there = "an object that it did not read"
            yield Finding(found.uri, f"only what {step} read", there, remedy)


def _digests(
    store: ObjectStore, uris: Sequence[str], description: str, distribute: Distribute | None
) -> Iterator[str]:
    """Yield the SHA-256 of each object; an empty one for an object that is missing."""
    groups = [
        (store, tuple(uris[first : first + _GROUP_OBJECTS]))
        for first in range(0, len(uris), _GROUP_OBJECTS)
    ]
    found = distribute(groups, _group_digests, description) if distribute else None
    return chain.from_iterable(map(_group_digests, groups) if found is None else found)


def _group_digests(group: tuple[ObjectStore, tuple[str, ...]]) -> list[str]:
    store, uris = group
    digests = []
    for _, answer in store.get_many(uris, GETS_IN_FLIGHT):
        if not isinstance(answer, Fetched | ObjectNotFound):
            raise answer
        digests.append(sha256(answer.data) if isinstance(answer, Fetched) else "")
    return digests


def _files_read(corpus_uri: str, manifest: Manifest) -> dict[str, str]:
    """Return where the corpus's files lie that a step read whole, by the name of the input.

    A language model outside the corpus may be anywhere, so that it is not looked for.
    """
    # Tuning keeps the evaluation's settings under their section's name.
    settings = manifest.config.get("evaluation", manifest.config)
    named = {name: settings.get(name, "") for name in LANGUAGE_MODEL_SETTINGS}
    uris = {name: resolve_audio(corpus_uri, each) for name, each in named.items() if each}
    uris[LEXICON_FILE] = join_uri(corpus_uri, LEXICON_FILE)
    inside = f"{corpus_uri.rstrip('/')}/"
    return {
        name: uri
        for name, uri in uris.items()
        if name in manifest.inputs and uri.startswith(inside)
    }


def _file_findings(store: ObjectStore, uri: str, expected: str, step: str) -> Iterator[Finding]:
    try:
        digest = sha256(store.get(uri))
    except ObjectNotFound:
        digest = ""
    if digest != expected:
        there = f"SHA-256 {digest[:16]}" if digest else "missing"
        remedy = f"put it back, or run {step} and what was made from it again in a new --run"
        yield Finding(uri, f"SHA-256 {expected[:16]}, as {step} read it", there, remedy)


def _ingested_before(store: ObjectStore, run_uri: str) -> Iterator[Manifest]:
    """Yield what the runs that an increment extends have ingested into the same corpus."""
    increment = read_increment(store, run_uri)
    for base in increment.bases if increment else ():
        if is_finished(store, base, INGEST_STEP):
            yield read_manifest(store, base, INGEST_STEP)


def _ingested_findings(
    store: ObjectStore, corpus_uri: str, ingested: Sequence[Manifest], grows: bool
) -> Iterator[Finding]:
    outputs = {join_uri(corpus_uri, output.key) for each in ingested for output in each.outputs}
    outputs.add(join_uri(corpus_uri, LEXICON_FILE))  # the steps that read it have its digest
    remedy = "find its writer, and move it out of the corpus"
    later = tuple(f"{join_uri(corpus_uri, each)}/" for each in _ADDED_FOLDERS)
    for found in store.list(corpus_uri):
        is_later = grows and found.uri.startswith(later)
        if found.uri not in outputs and not is_later:
            there = "an object that ingest did not store"
            yield Finding(found.uri, "only the corpus that was ingested", there, remedy)


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
