"""Compare the utterances of successive steps: none may be lost, doubled or added."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from jaxtyping import UInt32

from infra.store.object_store import ObjectStore
from pipeline.audit.hashed_names import names_in_ranges, names_twice, names_without, those
from pipeline.audit.step_records import Finding, StepRecords
from pipeline.audit.stored_objects import Holding, read_contents
from pipeline.runs.manifest import Manifest, read_output
from pipeline.runs.names import (
    ALIGNMENTS_FOLDER,
    BASE_INPUT,
    MANIFEST_FILE,
    SCRATCH_FOLDER,
    SELECTION_FOLDER,
    folder_of,
)
from pipeline.sampling import hash_names
from pipeline.steps.hash_ranges import is_among
from pipeline.steps.selection.id_index import IdRange, metadata_names, named_objects

NUM_NAMED = 3
"""A finding names at most this many utterances."""


def chain_findings(
    store: ObjectStore,
    run_uri: str,
    finished: Mapping[str, StepRecords],
    holdings: Mapping[str, Holding],
) -> Iterator[Finding]:
    """Compare the utterances of each step with those of the steps that it read."""
    for name, records in finished.items():
        manifest = records.manifest
        if manifest is None or manifest.is_inherited:
            continue
        if not records.has_tasks or name not in holdings:
            continue
        yield from _doubled(store, run_uri, name, holdings[name])
        if manifest.id_index:
            yield from _misplaced(store, run_uri, manifest, holdings[name])
        remedy, key = _do_not_use(name), f"{name}/{MANIFEST_FILE}"
        for earlier in _sources(manifest, finished):
            if earlier not in holdings:
                continue
            for found in _unlike(store, run_uri, holdings[earlier], holdings[name]):
                yield Finding(key, f"the utterances of {earlier}", found, remedy)
            before = finished[earlier].manifest
            if before is not None and before.tally_out != manifest.tally_in:
                expected = f"{before.tally_out} in, what {before.step} wrote"
                yield Finding(key, expected, f"{manifest.tally_in}", remedy)
    yield from _shared_by_subsets(store, run_uri, holdings)


def _do_not_use(step: str) -> str:
    return f"do not use {step}: run it again into a new --run"


@dataclass(slots=True)
class _Names:
    """_Names counts names with a fault, and keeps NUM_NAMED of them, those of the first objects."""

    number: int = 0
    first: IdRange = field(default_factory=lambda: IdRange.merged([]))
    last_place: int = -1

    @classmethod
    def of(cls, ranges: Iterable[IdRange]) -> "_Names":
        """Count each name once, however many objects hold it."""
        names = cls()
        for found in filter(lambda each: len(each.hashes), ranges):
            names.number += len(np.unique(found.hashes))
            names.last_place = max(names.last_place, int(found.objects.max()))
            both = IdRange.merged([names.first, found])
            order = np.argsort(both.objects, kind="stable")[:NUM_NAMED]
            names.first = IdRange(both.hashes[order], both.objects[order])
        return names


def _misplaced(
    store: ObjectStore, run_uri: str, manifest: Manifest, holding: Holding
) -> Iterator[Finding]:
    """Compare a selection's id index with its files and ledgers, and with its own metadata."""
    objects = {name: number for number, name in enumerate(named_objects(manifest))}
    numbers = np.array([objects[output.key] for output in holding.outputs], np.uint32)
    first_number = len(metadata_names(manifest))
    names = (holding.written, holding.quarantined)
    held_in_ranges = names_in_ranges(names, len(manifest.id_index))
    num_held, num_indexed, num_unread, is_equal = 0, 0, 0, True
    for output, found in zip(manifest.id_index, held_in_ranges, strict=True):
        held = _entries(found, numbers)
        index = IdRange.from_bytes(read_output(store, run_uri, output))
        is_metadata = index.objects < first_number
        placed = those(index, ~is_metadata)
        num_held, num_indexed = num_held + len(held.hashes), num_indexed + len(placed.hashes)
        is_equal = is_equal and placed.to_bytes() == held.to_bytes()
        read = np.sort(index.hashes[is_metadata])
        num_unread += len(np.unique(held.hashes[~is_among(held.hashes, read)]))
    if num_unread or not is_equal:
        said = f"{num_indexed:,}, or at other objects; {num_unread:,} without metadata"
        remedy = (
            f"remove {manifest.step}/{MANIFEST_FILE} and {manifest.step}/{SCRATCH_FOLDER}, and run "
            "the step again: it makes the same files, and what was made from them stays good"
        )
        expected = f"{num_held:,} entries for the ids of its files and ledgers"
        yield Finding(manifest.id_index[0].key, expected, said, remedy)


def _entries(found: IdRange, numbers: UInt32[np.ndarray, " objects"]) -> IdRange:
    """Return the index's entries of a range: rows without an id have none, a double id has one."""
    named = those(found, found.hashes != hash_names([""])[0])
    entries = IdRange.merged([IdRange(named.hashes, numbers[named.objects])])
    is_new = np.ones(len(entries.hashes), bool)
    is_new[1:] = (np.diff(entries.hashes) > 0) | (np.diff(entries.objects) > 0)
    return those(entries, is_new)


def _sources(manifest: Manifest, finished: Mapping[str, StepRecords]) -> list[str]:
    """Return the steps whose utterances a step takes: of targets and their features, the targets.

    Without one of its inputs, which is a finding, none is known.
    """
    inputs = [name for name in manifest.inputs if "/" in name and not name.startswith(BASE_INPUT)]
    if not finished.keys() >= {*inputs}:
        return []
    read = {name: finished[name].manifest for name in inputs if finished[name].has_tasks}
    # Realignment and teachers read the features again: only lattices take an alignment's.
    others = {name: read[name] for name in read if folder_of(name) != ALIGNMENTS_FOLDER} or read
    return [name for name in others if not any(e and name in e.inputs for e in others.values())]


def _doubled(store: ObjectStore, run_uri: str, step: str, holding: Holding) -> Iterator[Finding]:
    # A selection's ledger may repeat ids: that is a reason to be in it.
    is_selection = folder_of(step) == SELECTION_FOLDER
    twice = _Names.of(
        names_twice([holding.written, *([] if is_selection else [holding.quarantined])])
    )
    if twice.number:
        found = f"{twice.number:,} more than once: {_named(store, run_uri, holding, twice)}"
        where = holding.outputs[twice.last_place].key
        yield Finding(where, f"each utterance once in {step}", found, _do_not_use(step))


def _unlike(store: ObjectStore, run_uri: str, earlier: Holding, later: Holding) -> Iterator[str]:
    """Say what was lost or invented: the later step has the utterances of the earlier one."""
    before, after = [earlier.written], [later.written, later.quarantined]
    lost = _Names.of(names_without(before, after))
    if lost.number:
        yield f"{lost.number:,} lost: {_named(store, run_uri, earlier, lost)}"
    invented = _Names.of(names_without(after, before))
    if invented.number:
        yield f"{invented.number:,} not from there: {_named(store, run_uri, later, invented)}"


def _shared_by_subsets(
    store: ObjectStore, run_uri: str, holdings: Mapping[str, Holding]
) -> Iterator[Finding]:
    """Compare the subsets' selections: word error rates would be of speech that training heard."""
    selections = [name for name in holdings if folder_of(name) == SELECTION_FOLDER]
    remedy = "correct the metadata, and select again into a new --run"
    for one, other in combinations(selections, 2):
        mine, others = holdings[one], holdings[other]
        for noun, own, theirs in (
            ("utterances", mine.written, others.written),
            ("speakers", mine.speakers, others.speakers),
        ):
            shared = _Names.of(names_without([own], [theirs], are_shared=True))
            if shared.number:
                names = _named(store, run_uri, mine, shared, are_speakers=noun == "speakers")
                found = f"{shared.number:,} {noun}: {names}"
                key = f"{one}/{MANIFEST_FILE}"
                yield Finding(key, f"nothing shared with {other}", found, remedy)


def _named(
    store: ObjectStore, run_uri: str, holding: Holding, wanted: _Names, are_speakers: bool = False
) -> str:
    """Read the ids of some utterances or speakers again from their objects."""
    names: set[str] = set()
    for place in np.unique(wanted.first.objects).tolist():
        output = holding.outputs[place]
        contents = read_contents(output.key, read_output(store, run_uri, output))
        assert contents is not None, "hashes come from contents"
        ids = contents.speaker_ids if are_speakers else contents.utterance_ids
        is_wanted = np.isin(hash_names(ids), wanted.first.hashes)
        names.update(ids[row] for row in np.flatnonzero(is_wanted))
    return ", ".join(sorted(names)[:NUM_NAMED])
