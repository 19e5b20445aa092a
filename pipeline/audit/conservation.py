"""Compare the utterances of successive steps: none may be lost, doubled or added."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np
from jaxtyping import UInt32

from infra.store.object_store import ObjectStore
from pipeline.audit.step_records import Finding, StepRecords
from pipeline.audit.stored_objects import (
    HashedNames,
    Holding,
    NameRange,
    hash_names,
    num_ranges_of,
    read_contents,
)
from pipeline.runs.manifest import Manifest, read_output
from pipeline.runs.names import (
    ALIGNMENTS_FOLDER,
    BASE_INPUT,
    MANIFEST_FILE,
    SCRATCH_FOLDER,
    SELECTION_FOLDER,
    folder_of,
)
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
        if records.manifest is None or records.manifest.is_inherited:
            continue
        if not records.has_tasks or name not in holdings:
            continue
        yield from _doubled(store, run_uri, name, holdings[name])
        if records.manifest.id_index:
            yield from _misplaced(store, run_uri, records.manifest, holdings[name])
        for earlier in _sources(records.manifest, finished):
            if earlier in holdings:
                pair = (earlier, holdings[earlier]), (name, holdings[name])
                num_unselected = records.manifest.unselected.utterances
                yield from _unlike(store, run_uri, *pair, num_unselected)
                yield from _tallies(finished[earlier].manifest, records.manifest)
    yield from _shared_by_subsets(store, run_uri, holdings)


@dataclass(slots=True)
class _Names:
    """_Names counts names with a fault, and keeps NUM_NAMED of them, those of the first objects."""

    number: int = 0
    first: NameRange = field(default_factory=NameRange.joined)
    last_place: int = -1

    @classmethod
    def of(cls, ranges: Iterable[NameRange]) -> "_Names":
        """Count each name once, however many objects hold it."""
        names = cls()
        for found in filter(lambda each: len(each.hashes), ranges):
            names.number += len(np.unique(found.hashes))
            names.last_place = max(names.last_place, int(found.places.max()))
            both = NameRange.joined(names.first, found)
            order = np.argsort(both.places, kind="stable")[:NUM_NAMED]
            names.first = NameRange(both.hashes[order], both.places[order])
        return names


def names_in_ranges(names: Sequence[HashedNames], num_ranges: int) -> Iterator[NameRange]:
    """Yield range by range of hashes what several hold together."""
    for parts in zip(*(each.ranges(num_ranges) for each in names), strict=True):
        yield NameRange.joined(*parts)


def names_twice(names: Sequence[HashedNames]) -> Iterator[NameRange]:
    """Yield range by range the names that are there more than once, with all of their objects."""
    for found in names_in_ranges(names, num_ranges_of(*names)):
        unique, counts = np.unique(found.hashes, return_counts=True)
        yield found.those(is_among(found.hashes, unique[counts > 1]))


def names_without(
    names: Sequence[HashedNames], others: Sequence[HashedNames], are_shared: bool = False
) -> Iterator[NameRange]:
    """Yield range by range the names that are not among the others; or, `are_shared`, that are."""
    num_ranges = num_ranges_of(*names, *others)
    both = (names_in_ranges(each, num_ranges) for each in (names, others))
    for own, other in zip(*both, strict=True):
        yield own.those(is_among(own.hashes, other.hashes) == are_shared)


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
        placed = IdRange(index.hashes[~is_metadata], index.objects[~is_metadata])
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


def _entries(found: NameRange, numbers: UInt32[np.ndarray, " objects"]) -> IdRange:
    """Return the index's entries of a range: rows without an id have none, a double id has one."""
    named = found.those(found.hashes != hash_names([""])[0])
    entries = IdRange.merged([IdRange(named.hashes, numbers[named.places])])
    is_new = np.ones(len(entries.hashes), bool)
    is_new[1:] = (np.diff(entries.hashes) > 0) | (np.diff(entries.objects) > 0)
    return IdRange(entries.hashes[is_new], entries.objects[is_new])


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
        remedy = f"do not use {step}: run it again into a new --run"
        where = holding.outputs[twice.last_place].key
        yield Finding(where, f"each utterance once in {step}", found, remedy)


def _unlike(
    store: ObjectStore,
    run_uri: str,
    earlier: tuple[str, Holding],
    later: tuple[str, Holding],
    num_unselected: int,
) -> Iterator[Finding]:
    before, after = [earlier[1].written], [later[1].written, later[1].quarantined]
    remedy = f"do not use {later[0]}: run it again into a new --run"
    key = f"{later[0]}/{MANIFEST_FILE}"
    expected = f"the utterances of {earlier[0]}"
    # In both directions: nothing may be lost, and nothing invented.
    lost = _Names.of(names_without(before, after))
    # The bootstrap counts the utterances that it leaves to later rounds; they are not lost.
    if lost.number != num_unselected:
        found = f"{lost.number:,} lost: {_named(store, run_uri, earlier[1], lost)}"
        yield Finding(key, expected, found, remedy)
    invented = _Names.of(names_without(after, before))
    if invented.number:
        named = _named(store, run_uri, later[1], invented)
        yield Finding(key, expected, f"{invented.number:,} not from there: {named}", remedy)


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
            shared = _Names.of(names_without([mine], [others], are_shared=True))
            if shared.number:
                names = _named(store, run_uri, holdings[one], shared, kind == "speakers")
                noun = "utterances" if kind == "written" else kind
                key = f"{one}/{MANIFEST_FILE}"
                found = f"{shared.number:,} {noun}: {names}"
                yield Finding(key, f"nothing shared with {other}", found, remedy)


def _named(
    store: ObjectStore,
    run_uri: str,
    holding: Holding,
    wanted: _Names,
    are_speakers: bool = False,
) -> str:
    """Read the ids of some utterances or speakers again from their objects."""
    names: set[str] = set()
    for place in np.unique(wanted.first.places).tolist():
        output = holding.outputs[place]
        contents = read_contents(output.key, read_output(store, run_uri, output))
        assert contents is not None, "hashes come from contents"
        ids = contents.speaker_ids if are_speakers else contents.utterance_ids
        is_wanted = np.isin(hash_names(ids), wanted.first.hashes)
        names.update(ids[row] for row in np.flatnonzero(is_wanted))
    return ", ".join(sorted(names)[:NUM_NAMED])
