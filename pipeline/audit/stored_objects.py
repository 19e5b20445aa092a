"""Read every object that manifests name: its size, its digest and its utterances."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import UInt64

from infra.prefetch import prefetch
from infra.store.object_store import ObjectNotFound, ObjectStore, StoreError, join_uri
from pipeline.audit.contents import read_contents
from pipeline.audit.step_records import Finding, StepRecords
from pipeline.runs.manifest import Output, read_output, sha256
from pipeline.runs.names import INGEST_STEP, LEDGER_SUFFIX, SELECTION_FOLDER, folder_of
from pipeline.steps.selection.select import metadata_uri

GETS_IN_FLIGHT = 8
"""Shards of 100 MB in memory at a time."""

Hashes = UInt64[np.ndarray, " _utterances"]


@dataclass(frozen=True, slots=True)
class Holding:
    """Holding holds hashes of the utterances of a step's outputs and ledgers, object by object."""

    written: list[tuple[Output, Hashes]] = field(default_factory=list)
    quarantined: list[tuple[Output, Hashes]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Read:
    """The result of reading one object: its utterances, its damage, or its wrong counts."""

    hashes: Hashes | None = None
    damage: str = ""
    miscount: str = ""


def read_objects(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    records: StepRecords,
    progress: Callable[[int], None],
) -> tuple[Holding | None, list[Finding]]:
    """Read the objects that a step's manifest names, and report their bytes to `progress`.

    The holding is None where an object cannot be read, as its utterances are unknown.
    """
    holding, findings, is_whole = Holding(), [], True
    # The outputs of ingest are the corpus's, its ledger is the run's.
    base = corpus_uri if records.step == INGEST_STEP else run_uri

    def check(output: Output) -> _Read:
        # Digests and ids are made where the objects arrive, in as many threads.
        folder = run_uri if output.key.endswith(LEDGER_SUFFIX) else base
        return _check(store, folder, records.is_planned, output)

    for output, found in prefetch(check, records.objects, GETS_IN_FLIGHT):
        progress(output.num_bytes)
        remedy = records.remedy
        if found.damage:
            is_whole = False
            expected = f"{output.num_bytes:,} bytes, SHA-256 {output.sha256[:16]}"
            findings.append(Finding(output.key, expected, found.damage, remedy(output.key)))
        if found.miscount:
            expected = _counts(output.utterances, output.duration_ms)
            findings.append(Finding(output.key, expected, found.miscount, remedy(output.key)))
        if found.hashes is not None:
            is_ledger = output.key.endswith(LEDGER_SUFFIX)
            (holding.quarantined if is_ledger else holding.written).append((output, found.hashes))
    if folder_of(records.step) == SELECTION_FOLDER:
        findings += metadata_findings(store, corpus_uri, records)
    return holding if is_whole else None, findings


def _check(store: ObjectStore, base: str, has_utterances: bool, output: Output) -> _Read:
    try:
        data = store.get(join_uri(base, output.key))
    except ObjectNotFound:
        return _Read(damage="missing")
    digest = sha256(data)
    there = f"{len(data):,} bytes, SHA-256 {digest[:16]}"
    try:
        if digest != output.sha256:
            data = read_output(store, base, output)  # again: the network may have damaged it
        contents = read_contents(output.key, data) if has_utterances else None
    except ValueError as error:
        return _Read(damage=f"{there} ({str(error)[:200]})")
    if contents is None:
        return _Read()
    # Target shards do not repeat the durations.
    duration_ms = output.duration_ms if contents.duration_ms is None else contents.duration_ms
    found = (len(contents.utterance_ids), duration_ms)
    is_right = found == (output.utterances, output.duration_ms)
    return _Read(contents.hashes(), miscount="" if is_right else _counts(*found))


def _counts(num_utterances: int, duration_ms: int) -> str:
    return f"{num_utterances:,} utterances, {duration_ms:,} ms"


def metadata_findings(
    store: ObjectStore, corpus_uri: str, records: StepRecords
) -> Iterator[Finding]:
    """Yield a finding for each metadata object that changed since the selection read it."""
    assert records.manifest is not None, "only finished steps are read"
    inputs: Mapping[str, str] = records.manifest.inputs
    base = metadata_uri(corpus_uri, records.step.rpartition("/")[2])
    uris = [join_uri(base, name) for name in inputs]
    remedy = "put the metadata back, or select again into a new --run"
    for expected, (uri, found) in zip(
        inputs.values(), store.get_many(uris, GETS_IN_FLIGHT), strict=True
    ):
        digest = "" if isinstance(found, StoreError) else sha256(found.data)
        if digest != expected:
            there = f"SHA-256 {digest[:16]}" if digest else "missing"
            yield Finding(uri, f"SHA-256 {expected[:16]}, as selected from", there, remedy)
