"""Compare a corpus with what the run's steps read of it: metadata, lexicon, audio."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from infra.configuration import read_record
from infra.store.object_store import Fetched, ObjectNotFound, ObjectStore, join_uri
from infra.store.uris import resolve_audio
from pipeline.audit.contents import AudioVersion, hash_names
from pipeline.audit.step_records import Finding, StepRecords
from pipeline.audit.stored_objects import Holding, version_name
from pipeline.filters import SelectionFilters
from pipeline.runs.increment import read_increment
from pipeline.runs.manifest import Manifest, Output, is_finished, read_manifest, sha256
from pipeline.runs.names import (
    ACOUSTICS_FOLDER,
    AUDIO_FOLDER,
    INGEST_STEP,
    LANGUAGE_MODEL_SETTINGS,
    LEXICON_FILE,
    METADATA_FOLDER,
    SELECTION_FOLDER,
    UNLABELLED,
    folder_of,
    selection_step,
)
from pipeline.runs.step import Distribute
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
