"""Select for an increment: new metadata, and utterances that its chain has selected before.

An increment reads the metadata that no earlier run of its chain has read, or all of it again. The
utterance ids are looked up in the id indexes of those runs, range by range of hashes, as sorted
lists: no process holds more than one range, however long the chain is.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

import numpy as np
from jaxtyping import UInt64

from infra.prefetch import prefetch
from infra.settings import shown
from infra.store.object_store import (
    ObjectInfo,
    ObjectNotFound,
    ObjectStore,
    join_uri,
    normalize_uri,
    read_checked,
)
from pipeline.filters import CREATED_AT, ends_later
from pipeline.records import Tally
from pipeline.runs.commit import Commit
from pipeline.runs.engine import Extension, ScratchTasks, Statistics
from pipeline.runs.increment import BaseStep, read_base, read_bases
from pipeline.runs.manifest import Manifest, Output, read_manifest
from pipeline.runs.names import INCREMENT_METADATA
from pipeline.runs.sealed_json import read_sealed, seal, typed_value
from pipeline.sampling import NUM_PRIORITIES
from pipeline.settings import MAY_DIFFER, SelectionConfig
from pipeline.steps.hash_ranges import Gathered, gathered_objects, overlapping, put_extents
from pipeline.steps.selection.id_index import IdRange, metadata_names

SIZES = "metadata_bytes"
"""The statistic of a selection with the size of each metadata object that it read, by name."""

LAST_PRIORITY = "last_priority"
"""The statistic of a selection with a budget: the last priority that it selected.

It is text, 16 hexadecimal digits, as many a reader of JSON would round a number of 64 bits.
"""

_NAMES, _DATES = "names", "dates"

Buckets = Mapping[str, Sequence[ObjectInfo]]


class Amount(TypedDict):
    """Amount is a tally as statistics hold it, beside its hours."""

    utterances: int
    duration_ms: int


def tallies_by_name(parts: Iterable[Mapping[str, Amount]]) -> dict[str, Tally]:
    """Add up tallies of the same name, such as a reason; in the order of names."""
    totals: dict[str, Tally] = defaultdict(Tally)
    for part in parts:
        for name, each in part.items():
            totals[name] += Tally(each["utterances"], each["duration_ms"])
    return dict(sorted(totals.items()))


def with_hours(tallies: Mapping[str, Tally]) -> dict[str, dict[str, Any]]:
    """Return tallies by name as a manifest's statistics have them."""
    return {
        name: {**asdict(tally), "hours": round(tally.hours, 6)} for name, tally in tallies.items()
    }


@dataclass(frozen=True, slots=True)
class ExtendedSelection:
    """ExtendedSelection is what an increment's selection knows of the runs before it.

    With the hours of its base it selects the same share, up to the base's `last_priority`. With
    more it reads all metadata again, as it does for records that only its later end admits.
    """

    base: BaseStep
    bases: tuple[str, ...]
    keeps_share: bool
    is_read_again: bool

    @property
    def last_priority(self) -> int:
        """The last priority that the base selected."""
        # A run without a budget has selected all.
        highest = f"{NUM_PRIORITIES - 1:016x}"
        last = self.base.manifest.statistic(LAST_PRIORITY, str, highest)
        if re.fullmatch("[0-9a-f]{16}", last) is None:
            raise ValueError(
                f"the manifest of {self.base.manifest.step}: {LAST_PRIORITY} = {shown(last)}: need "
                "16 hexadecimal digits: extend another run"
            )
        return int(last, 16)

    @property
    def extension(self) -> Extension:
        """How the increment's selection is joined with its base's."""
        return Extension(self._statistics, all_again=self.is_read_again)

    def _statistics(self, before: Manifest, own: Statistics) -> Statistics:
        has_budget = LAST_PRIORITY in before.statistics and not self.is_read_again
        last = {LAST_PRIORITY: before.statistics[LAST_PRIORITY]} if has_budget else {}
        return {**own, **last}


def extended_selection(
    store: ObjectStore, run_uri: str, step: str, config: Mapping[str, Any]
) -> ExtendedSelection | None:
    """Return what an increment extends; None for a run that extends none.

    ValueError for a budget below the base's, for a cap of hours a speaker, for other settings, and
    for more hours with an earlier end.
    """
    base = read_base(store, run_uri, step, config, MAY_DIFFER)
    if base is None:
        return None
    if config["filters"]["max_speaker_hours"]:
        raise ValueError(
            "selection.filters.max_speaker_hours: need 0 in an increment: the cap would have to "
            "take back what the base has selected"
        )
    hours, before = config["hours"], base.manifest.config["hours"]
    if (before == 0 and hours) or 0 < hours < before:
        raise ValueError(
            f"selection.hours = {hours:g}: need {before:g}, as the base has, or more: what was "
            "selected stays selected; 0 selects all"
        )
    bases, keeps_share = read_bases(store, run_uri).extends, hours == before
    opens = _end_moves(base, config, may_be_earlier=keeps_share) and any(
        # Records that the dates left out come back only if their objects are read again.
        CREATED_AT
        in read_manifest(store, each, step).statistic("unselected", dict[str, Amount], {})
        for each in bases
    )
    return ExtendedSelection(base, bases, keeps_share, not keeps_share or opens)


def _end_moves(base: BaseStep, config: Mapping[str, Any], *, may_be_earlier: bool) -> bool:
    """Return whether dates end later than the base's; ValueError if they may not end earlier."""
    end, before = (each["filters"]["created_before"] for each in (config, base.manifest.config))
    if ends_later(before, end) and not may_be_earlier:
        raise ValueError(
            f"selection.filters.created_before = {end!r} with more hours: need {before!r}, as the "
            "base has, or later: what was selected stays selected"
        )
    return ends_later(end, before)


def metadata_to_read(
    store: ObjectStore,
    run_uri: str,
    metadata_uri: str,
    listing: Buckets,
    extended: ExtendedSelection,
    config: SelectionConfig,
) -> dict[str, list[ObjectInfo]]:
    """Keep the metadata objects that no run of the chain has read, by bucket; or all, read again.

    New ones are recorded at the first attempt: an object that arrives later waits for the next
    increment. ValueError names an object that has another size than the chain read, or one that
    is to be read and is not listed; and dates that the first attempt did not have, of whose days
    the objects would not be read.
    """
    known: dict[str, int] = {}
    for each in extended.bases:
        earlier = read_manifest(store, each, extended.base.manifest.step)
        known |= earlier.statistic(SIZES, dict[str, int])
    base, listed = f"{normalize_uri(metadata_uri)}/", sizes(listing, metadata_uri)
    for name, num_bytes in listed.items():
        if known.get(name, num_bytes) != num_bytes:
            raise ValueError(
                f"{base}{name} has {num_bytes} bytes, and had {known[name]} when an earlier run "
                "read it: put the object back, and write new records into new objects"
            )
    new = [name for name in listed if name not in known]
    filters = config.filters
    dates = [filters.created_from, filters.created_before] if config.date_folders else []
    names = _recorded(store, run_uri, new, dates)
    names |= known.keys() if extended.is_read_again else set()
    if missing := sorted(names - listed.keys()):
        raise ValueError(
            f"{base}: of {len(names)} metadata objects that this increment reads the listing lacks "
            f"{len(missing)}, such as {missing[0]}: put back what was removed, or use a store that "
            "lists all that it holds"
        )
    kept = {
        bucket: [each for each in objects if each.uri.removeprefix(base) in names]
        for bucket, objects in listing.items()
    }
    return {bucket: objects for bucket, objects in kept.items() if objects}


def sizes(listing: Buckets, metadata_uri: str) -> dict[str, int]:
    """Return the bytes of each metadata object by its name."""
    base = f"{normalize_uri(metadata_uri)}/"
    return {
        each.uri.removeprefix(base): each.num_bytes
        for objects in listing.values()
        for each in objects
    }


def _recorded(
    store: ObjectStore, run_uri: str, names: Sequence[str], dates: Sequence[str]
) -> frozenset[str]:
    """Return the names that the first attempt recorded; ValueError if it had other dates."""
    uri = join_uri(run_uri, INCREMENT_METADATA)
    store.put_if_absent(uri, seal({_NAMES: sorted(names), _DATES: [*dates]}, indent=1))

    def parse(record: Mapping[str, Any]) -> tuple[list[str], list[str]]:
        found, of_first = (typed_value(record, name, list[str]) for name in (_NAMES, _DATES))
        return found, of_first

    try:
        remedy = "remove it and select again into a new --run"
        recorded, before = read_checked(store, uri, lambda data: read_sealed(data, remedy, parse))
    except ObjectNotFound as error:
        raise ValueError(f"{uri} has gone: another process removes the run") from error
    if before != [*dates]:
        raise ValueError(
            f"{uri}: the first attempt read the days of created_from and created_before = "
            f"{before}, and this one asks for {[*dates]} ([]: date_folders = false): set what it "
            "had, or select into a new --run"
        )
    return frozenset(recorded)


Hashes = UInt64[np.ndarray, " _ids"]


@dataclass(frozen=True, slots=True)
class _RunIndex:
    """The id index of one run of the chain, and which of its objects are selection files."""

    ranges: tuple[Output, ...]
    first_file: int
    num_files: int

    @classmethod
    def of(cls, run_uri: str, manifest: Manifest) -> "_RunIndex":
        ranges = tuple(each.seen_from(run_uri) for each in manifest.id_index)
        num_files = len(manifest.own_outputs)
        return cls(ranges, len(metadata_names(manifest)), num_files)

    def part(self, number: int, num_ranges: int) -> "_RunIndex":
        """Return the index with the ranges alone that share hashes with a range of another one."""
        some = overlapping(self.ranges, range(number, number + 1), num_ranges)
        return _RunIndex(some, self.first_file, self.num_files)

    def selected(self, parts: Sequence[IdRange]) -> Hashes:
        """Return the ids that files have, among those that the index has of any object."""
        first, end = self.first_file, self.first_file + self.num_files
        some = (part.hashes[(part.objects >= first) & (part.objects < end)] for part in parts)
        return np.concatenate([np.empty(0, np.uint64), *some])


@dataclass(frozen=True, slots=True)
class _RangeTask:
    """One range of hashes: the ids of each bucket in it, and the indexes of the chain's runs."""

    number: int
    ids: Gathered
    chain: tuple[_RunIndex, ...]


def find_selected_before(
    scratch: ScratchTasks,
    bases: Sequence[str],
    step: str,
    hashed: Sequence[Commit],
    num_ranges: int,
) -> Gathered:
    """List the ids of each bucket that a run among the `bases` has selected.

    `hashed` are the commits of the buckets' ids, in ranges.
    """
    context = scratch.context
    indexes = [_RunIndex.of(base, read_manifest(context.store, base, step)) for base in bases]
    ids = Gathered.of(context, gathered_objects(hashed), num_ranges)
    tasks = [
        _RangeTask(number, ids, tuple(each.part(number, num_ranges) for each in indexes))
        for number in range(num_ranges)
    ]
    found = scratch.distribute(tasks, _find_in_range, "look for what was selected before")
    return Gathered.of(context, [each for each in found if each], len(hashed))


def _find_in_range(task: _RangeTask) -> Output | None:
    """Store the ids of a range that a run of the chain has selected, if there are some."""
    scratch = task.ids.context
    before = [np.empty(0, np.uint64)]
    for each in task.chain:
        read = prefetch(scratch.read, each.ranges)
        before.append(each.selected([IdRange.from_bytes(data) for _, data in read]))
    selected = np.unique(np.concatenate(before))
    found = []
    for data in task.ids.read(task.number):
        ids = np.unique(IdRange.from_bytes(data).hashes)
        found.append(ids[np.isin(ids, selected, assume_unique=True)])
    if not any(map(len, found)):
        return None
    extents = (ids.astype("<u8").tobytes() for ids in found)
    return put_extents(scratch, f"before-{task.number:05d}", ".before", extents, Tally())
