"""Compare a corpus with what the run's steps read of it: metadata, lexicon, audio."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np

from infra.prefetch import prefetch
from infra.settings import read_record
from infra.store.object_store import Fetched, ObjectNotFound, ObjectStore, SizeBound, join_uri
from infra.store.uris import is_s3, is_within, normalize_uri, resolve_audio
from pipeline.audio.errors import AudioError
from pipeline.audit.hashed_names import HashedNames, Hashes, names_without
from pipeline.audit.step_records import Finding, StepRecords
from pipeline.audit.stored_objects import AudioVersion, Holding, read_contents
from pipeline.filters import SelectionFilters
from pipeline.records import part_from_text
from pipeline.runs.engine import Distribute
from pipeline.runs.increment import read_bases
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
from pipeline.sampling import hash_names
from pipeline.settings import ANY_AUDIO
from pipeline.steps.audio_reads import WantedAudio, read_audio
from pipeline.steps.selection.buckets import is_mark, is_within_dates
from pipeline.steps.selection.id_index import metadata_names
from pipeline.steps.selection.select import metadata_uri

GETS_IN_FLIGHT = 16

_GROUP_OBJECTS = 256
"""A task reads so many metadata objects; a million hours have 180,000 of 0.2 MB."""

LISTS_IN_FLIGHT = 8

SHARDS_AT_A_TIME = 200
"""Tasks read the audio of so many shards, then the driver has their findings."""

MAX_FOLDERS = 10_000
"""Above so many folders of audio, such as one a speaker, the folders above them are listed."""

MAX_NAMED = 100
"""A step's findings name at most so many audio objects; one more counts the others."""

_AUDIO_REMEDY = "put the audio back, or extract again into a new --run"


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
    for step, records in finished.items():
        assert records.manifest is not None, "only finished steps are compared"
        if records.manifest.is_inherited:
            continue  # the base's, where it is verified
        if folder_of(step) == SELECTION_FOLDER:
            yield from _metadata_findings(store, corpus_uri, records.manifest, grows, distribute)
        digests = _files_read(corpus_uri, records.manifest)
        remedy = f"put it back, or run {step} and what was made from it again in a new --run"
        yield from digest_findings(store, digests, f"as {step} read it", remedy)
    ingested = finished[INGEST_STEP].manifest if INGEST_STEP in finished else None
    if ingested is not None:
        # A run with bases has ingested into their corpus.
        earlier = (
            read_manifest(store, base, INGEST_STEP)
            for base in read_bases(store, run_uri).runs
            if is_finished(store, base, INGEST_STEP)
        )
        yield from _ingested_findings(store, corpus_uri, [ingested, *earlier], grows)


def in_doubt(
    store: ObjectStore, corpus_uri: str, ingested: Sequence[Output], holdings: Mapping[str, Holding]
) -> list[Output]:
    """Return the outputs of ingest without the audio whose listed ETag is the one extraction read.

    The ETags of a local listing are no digests, so that no local audio is left out.
    """
    listed = store.list(join_uri(corpus_uri, AUDIO_FOLDER))
    etags = {found.uri: found.etag for found in listed}
    uris = (join_uri(corpus_uri, output.key) for output in ingested)
    versions = [AudioVersion(uri, etags.get(uri, "")) for uri in uris]
    names = hash_names([each.name(corpus_uri) for each in versions])
    is_heard = np.zeros(len(names), bool)
    for holding in holdings.values():
        is_heard |= holding.audio.hold(names)
    return [output for output, found in zip(ingested, is_heard.tolist(), strict=True) if not found]


def digest_findings(
    store: ObjectStore,
    digests: Mapping[str, str],
    read: str,
    remedy: str,
    description: str = "",
    distribute: Distribute | None = None,
) -> Iterator[Finding]:
    """Yield a finding for each object, by its URI, that has not the SHA-256 that a step `read`."""
    uris = list(digests)
    groups = [uris[n : n + _GROUP_OBJECTS] for n in range(0, len(uris), _GROUP_OBJECTS)]
    read_group = partial(_digests, store)
    by_tasks = distribute(groups, read_group, description) if distribute else None
    found = chain.from_iterable(by_tasks or map(read_group, groups))
    for (uri, expected), digest in zip(digests.items(), found, strict=True):
        if digest != expected:
            there = f"SHA-256 {digest[:16]}" if digest else "missing"
            yield Finding(uri, f"SHA-256 {expected[:16]}, {read}", there, remedy)


def _digests(store: ObjectStore, uris: Sequence[str]) -> list[str]:
    """Return the SHA-256 of each object; an empty one for an object that is missing."""
    digests = []
    for _, answer in store.get_many(uris, GETS_IN_FLIGHT):
        if not isinstance(answer, Fetched | ObjectNotFound):
            raise answer
        digests.append(sha256(answer.data) if isinstance(answer, Fetched) else "")
    return digests


def _metadata_findings(
    store: ObjectStore,
    corpus_uri: str,
    manifest: Manifest,
    grows: bool,
    distribute: Distribute | None,
) -> Iterator[Finding]:
    step = manifest.step
    base = metadata_uri(corpus_uri, step.rpartition("/")[2])
    digests = {join_uri(base, name): manifest.inputs[name] for name in metadata_names(manifest)}
    remedy = "put the metadata back, or select again into a new --run"
    description = f"verify the metadata of {step}"
    yield from digest_findings(store, digests, "as selected from", remedy, description, distribute)
    if grows:
        return
    prunes = step == selection_step(UNLABELLED) and manifest.config.get("date_folders", False)
    filters = read_record(SelectionFilters, manifest.config.get("filters", {}), "filters")
    for found in store.list(base):
        name = found.uri.removeprefix(f"{normalize_uri(base)}/")
        is_unread = prunes and not is_within_dates(name, filters)
        if found.uri not in digests and not is_mark(found) and not is_unread:
            there = "an object that it did not read"
            yield Finding(found.uri, f"only what {step} read", there, remedy)


def _files_read(corpus_uri: str, manifest: Manifest) -> dict[str, str]:
    """Return the URIs of the corpus's files that a step read whole, each with its digest then.

    A language model outside the corpus may be anywhere, so that it is not looked for.
    """
    # Tuning keeps the evaluation's settings under their section's name.
    settings = manifest.config.get("evaluation", manifest.config)
    named = {name: settings.get(name, "") for name in LANGUAGE_MODEL_SETTINGS}
    uris = {name: resolve_audio(corpus_uri, each) for name, each in named.items() if each}
    uris[LEXICON_FILE] = join_uri(corpus_uri, LEXICON_FILE)
    inside = f"{corpus_uri.rstrip('/')}/"
    return {
        uri: manifest.inputs[name]
        for name, uri in uris.items()
        if name in manifest.inputs and uri.startswith(inside)
    }


def _ingested_findings(
    store: ObjectStore, corpus_uri: str, ingested: Sequence[Manifest], grows: bool
) -> Iterator[Finding]:
    outputs = {join_uri(corpus_uri, output.key) for each in ingested for output in each.outputs}
    outputs.add(join_uri(corpus_uri, LEXICON_FILE))  # the steps that read it have its digest
    remedy = "find its writer, and move it out of the corpus"
    # Later increments add objects to these folders.
    later = tuple(
        f"{join_uri(corpus_uri, each)}/"
        for each in (METADATA_FOLDER, AUDIO_FOLDER, ACOUSTICS_FOLDER)
    )
    for found in store.list(corpus_uri):
        is_later = grows and found.uri.startswith(later)
        if found.uri not in outputs and not is_later:
            there = "an object that ingest did not store"
            yield Finding(found.uri, "only the corpus that was ingested", there, remedy)


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
    confirms none. Where `distribute` runs tasks, these read all audio of a shard of which anything
    is in doubt.
    """
    features = {step: each for step, each in holdings.items() if folder_of(step) == FEATURES_FOLDER}
    confirmed = holdings[INGEST_STEP].audio if INGEST_STEP in holdings else HashedNames()
    if not reads_bytes:
        folders = {folder for each in features.values() for folder in each.folders}
        in_s3 = {folder for folder in folders if is_s3(folder)}
        to_list = outermost(in_s3, store.allowed_prefixes)
        for _, hashes in prefetch(partial(_listed_versions, store), to_list, LISTS_IN_FLIGHT):
            confirmed.add(hashes)
    for step, holding in features.items():
        doubtful = [
            np.unique(found.objects) for found in names_without([holding.audio], [confirmed])
        ]
        shards = [holding.outputs[n] for n in np.unique(np.concatenate(doubtful)).tolist()]
        changed = partial(_changed, store, run_uri, corpus_uri, step)
        number = 0
        for place in range(0, len(shards), SHARDS_AT_A_TIME):
            some = shards[place : place + SHARDS_AT_A_TIME]
            by_tasks = distribute(some, changed, "verify audio") if distribute else None
            for more, first in by_tasks or (changed(shard, confirmed) for shard in some):
                yield from first[: max(MAX_NAMED - number, 0)]
                number += more
        if number > MAX_NAMED:
            said = f"{number - MAX_NAMED:,} more audio objects are not as {step} read them"
            yield Finding(corpus_uri, "audio as it was", said, _AUDIO_REMEDY)


def outermost(folders: Collection[str], prefixes: Sequence[str]) -> list[str]:
    """Return the folders in no other one; where there are very many, those that hold the deepest.

    None lies above a prefix.
    """
    kept: list[str] = []
    for folder in sorted(f"{each}/" for each in folders):
        if not kept or not folder.startswith(kept[-1]):
            kept.append(folder)
    kept = [folder.rstrip("/") for folder in kept]
    if len(kept) <= MAX_FOLDERS:
        return kept
    raisable = [each for each in kept if is_within(each.rpartition("/")[0], prefixes)]
    deepest = max((each.count("/") for each in raisable), default=0)
    raised = {each for each in raisable if each.count("/") == deepest}
    if not raised:
        return kept
    parents = {each.rpartition("/")[0] for each in raised}
    return outermost({*kept} - raised | parents, prefixes)


def _listed_versions(store: ObjectStore, folder: str) -> Hashes:
    versions = (AudioVersion(found.uri, found.etag) for found in store.list(folder))
    return hash_names([each.name(folder) for each in versions])


def _changed(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    step: str,
    output: Output,
    confirmed: HashedNames | None = None,
) -> tuple[int, list[Finding]]:
    """Read the audio of a feature shard that is not confirmed, and compare it.

    Return the number of objects that are not as extraction read them, and the first findings.
    """
    contents = read_contents(output.key, read_output(store, run_uri, output))
    assert contents is not None, "hashes come from contents"
    doubtful = [each for each in contents.audio if each.etag]
    if confirmed is not None:
        names = hash_names([each.name(corpus_uri) for each in doubtful])
        doubtful = [doubtful[row] for row in np.flatnonzero(~confirmed.hold(names))]
    uris = [resolve_audio(corpus_uri, each.uri) for each in doubtful]
    wanted = [
        WantedAudio(uri, SizeBound(), part_from_text(each.part), ANY_AUDIO)
        for uri, each in zip(uris, doubtful, strict=True)
    ]
    number, first = 0, list[Finding]()
    for expected, uri, found in zip(
        doubtful, uris, read_audio(store, wanted, GETS_IN_FLIGHT), strict=True
    ):
        if isinstance(found, Fetched):
            there = f"ETag {found.etag}"
        elif isinstance(found, AudioError):
            there = f"{found.reason}: {found.detail}"
        elif isinstance(found, ObjectNotFound):
            there = "missing"
        else:
            raise found  # about access
        if there != f"ETag {expected.etag}":
            number += 1
            if number <= MAX_NAMED:
                part = f", {expected.part}" if expected.part else ""
                said = f"ETag {expected.etag}{part}, as {step} read it"
                first.append(Finding(uri, said, there, _AUDIO_REMEDY))
    return number, first
