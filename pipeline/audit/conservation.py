"""Compare the utterances of successive steps: none may be lost, doubled or added."""

from collections.abc import Iterator, Mapping
from itertools import combinations

import numpy as np

from infra.store.object_store import ObjectStore
from pipeline.audit.contents import Hashes, hash_names, read_contents
from pipeline.audit.step_records import Finding, StepRecords
from pipeline.audit.stored_objects import Holding, Pieces, joined
from pipeline.runs.manifest import Manifest, read_output
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    FEATURES_FOLDER,
    LATTICES_FOLDER,
    MANIFEST_FILE,
    SCRATCH_FOLDER,
    SELECTION_FOLDER,
    TARGETS_FOLDER,
    folder_of,
)
from pipeline.steps.selection.id_index import metadata_names, named_objects
from pipeline.steps.selection.id_ranges import IdRange

NUM_NAMED = 3
"""A finding names at most this many utterances."""

_EARLIER = {SELECTION_FOLDER, FEATURES_FOLDER, TARGETS_FOLDER}


def chain_findings(
    store: ObjectStore,
    run_uri: str,
    finished: Mapping[str, StepRecords],
    holdings: Mapping[str, Holding],
) -> Iterator[Finding]:
    """Compare the utterances of each step with those of the steps that it read."""
    for name, records in finished.items():
        if records.manifest is None or records.manifest.is_inherited:
            continue
        if not records.is_planned or name not in holdings:
            continue
        yield from _doubled(store, run_uri, name, holdings[name])
        if records.manifest.id_index:
            yield from _misplaced(store, run_uri, records.manifest, holdings[name])
        for earlier in _sources(records.manifest):
            # The realignment reads the features again, so only lattices are the alignment's.
            is_whole = folder_of(name) == LATTICES_FOLDER and earlier == ALIGNMENT_STEP
            if (is_whole or folder_of(earlier) in _EARLIER) and earlier in holdings:
                pair = (earlier, holdings[earlier]), (name, holdings[name])
                num_unselected = records.manifest.unselected.utterances
                yield from _unlike(store, run_uri, *pair, num_unselected)
                yield from _tallies(finished[earlier].manifest, records.manifest)
    yield from _shared_by_subsets(store, run_uri, holdings)


def _misplaced(
    store: ObjectStore, run_uri: str, manifest: Manifest, holding: Holding
) -> Iterator[Finding]:
    """Compare a selection's id index with its files and ledgers, and with its own metadata."""
    stored = (read_output(store, run_uri, each) for each in manifest.id_index)
    index = IdRange.merged([IdRange.from_bytes(data) for data in stored])
    numbers = {name: number for number, name in enumerate(named_objects(manifest))}
    is_metadata = index.objects < len(metadata_names(manifest))
    # Rows without an id are not indexed, nor is an id twice for one object.
    nameless = hash_names([""])[0]
    held = IdRange.merged(
        [
            IdRange(found, np.full(len(found), numbers[output.key], np.uint32))
            for output, hashes in (*holding.written, *holding.quarantined)
            for found in [np.unique(hashes[hashes != nameless])]
        ]
    )
    placed = IdRange(index.hashes[~is_metadata], index.objects[~is_metadata])
    unread = names_without(held.hashes, index.hashes[is_metadata])
    if placed.to_bytes() != held.to_bytes() or len(unread):
        found = f"{len(placed.hashes):,}, or at other objects; {len(unread):,} without metadata"
        remedy = (
            f"remove {manifest.step}/{MANIFEST_FILE} and {manifest.step}/{SCRATCH_FOLDER}, and run "
            "the step again: it makes the same files, and what was made from them stays good"
        )
        expected = f"{len(held.hashes):,} entries for the ids of its files and ledgers"
        yield Finding(manifest.id_index[0].key, expected, found, remedy)


def _sources(manifest: Manifest) -> list[str]:
    """Return the steps whose utterances a step takes: targets have what the teacher labelled."""
    labelled = [each for each in manifest.inputs if folder_of(each) == TARGETS_FOLDER]
    return labelled or list(manifest.inputs)


def _doubled(store: ObjectStore, run_uri: str, step: str, holding: Holding) -> Iterator[Finding]:
    # A selection's ledger may repeat ids: that is a reason to be in it.
    is_selection = folder_of(step) == SELECTION_FOLDER
    pieces = [*holding.written, *([] if is_selection else holding.quarantined)]
    hashes, counts = np.unique(joined(pieces), return_counts=True)
    twice = hashes[counts > 1]
    if len(twice):
        where = [piece for piece in pieces if np.isin(piece[1], twice).any()]
        found = f"{len(twice):,} more than once: {_named(store, run_uri, pieces, twice)}"
        remedy = f"do not use {step}: run it again into a new --run"
        yield Finding(where[-1][0].key, f"each utterance once in {step}", found, remedy)


def _unlike(
    store: ObjectStore,
    run_uri: str,
    earlier: tuple[str, Holding],
    later: tuple[str, Holding],
    num_unselected: int,
) -> Iterator[Finding]:
    before, after = earlier[1].written, [*later[1].written, *later[1].quarantined]
    remedy = f"do not use {later[0]}: run it again into a new --run"
    # In both directions: nothing may be lost, and nothing invented.
    for pieces, others, fault in ((before, after, "lost"), (after, before, "not from there")):
        # 64-bit hashes replace the ids: 8 bytes an utterance and step.
        wrong = names_without(joined(pieces), joined(others))
        # The bootstrap counts the utterances that it leaves to later rounds; they are not lost.
        if len(wrong) != (num_unselected if fault == "lost" else 0):
            found = f"{len(wrong):,} {fault}: {_named(store, run_uri, pieces, wrong)}"
            key = f"{later[0]}/{MANIFEST_FILE}"
            yield Finding(key, f"the utterances of {earlier[0]}", found, remedy)


def names_without(names: Hashes, others: Hashes) -> Hashes:
    """Return the names that are not among the others, once each and in order."""
    # Two sorts and a walk: np.unique and np.setdiff1d take many times as long for 64-bit names.
    own, sorted_others = np.sort(names), np.sort(others)
    places = np.searchsorted(sorted_others, own)
    inside = places < len(sorted_others)
    is_there = np.zeros(len(own), dtype=bool)
    is_there[inside] = sorted_others[places[inside]] == own[inside]
    return np.unique(own[~is_there])


def _tallies(earlier: Manifest | None, later: Manifest) -> Iterator[Finding]:
    if earlier is not None and earlier.tally_out != later.tally_in:
        expected = f"{earlier.tally_out} in, what {earlier.step} wrote"
        remedy = f"do not use {later.step}: run it again into a new --run"
        yield Finding(f"{later.step}/{MANIFEST_FILE}", expected, f"{later.tally_in}", remedy)


def _shared_by_subsets(
    store: ObjectStore, run_uri: str, holdings: Mapping[str, Holding]
) -> Iterator[Finding]:
    """Compare the subsets' selections: word error rates would be of speech that training heard."""
    selections = [name for name in holdings if folder_of(name) == SELECTION_FOLDER]
    remedy = "correct the metadata, and select again into a new --run"
    for one, other in combinations(selections, 2):
        for kind in ("written", "speakers"):
            mine, others = (getattr(holdings[name], kind) for name in (one, other))
            # A held-out speaker that training heard would make word error rates too low.
            shared = np.intersect1d(joined(mine), joined(others))
            if len(shared):
                names = _named(store, run_uri, mine, shared, kind == "speakers")
                found = f"{len(shared):,} {'utterances' if kind == 'written' else kind}: {names}"
                key = f"{one}/{MANIFEST_FILE}"
                yield Finding(key, f"nothing shared with {other}", found, remedy)


def _named(
    store: ObjectStore,
    run_uri: str,
    pieces: Pieces,
    wanted: Hashes,
    are_speakers: bool = False,
) -> str:
    """Read the ids of some utterances or speakers again from their objects."""
    names: list[str] = []
    for output, hashes in pieces:
        rows = np.flatnonzero(np.isin(hashes, wanted))
        if len(rows) and len(names) < NUM_NAMED:
            contents = read_contents(output.key, read_output(store, run_uri, output))
            assert contents is not None, "hashes come from contents"
            ids = contents.speaker_ids if are_speakers else contents.utterance_ids
            names += [ids[row] for row in rows[:NUM_NAMED]]
    return ", ".join(sorted(set(names))[:NUM_NAMED])
