"""Ranges of hashes: cut, stored as extents of one object, read by their tasks, and merged."""

import pickle
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.store.object_store import FetchedRange, ObjectStore, join_uri
from infra.task_metrics import REQUESTS
from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext, committed_tasks
from pipeline.runs.manifest import Manifest, OutputsInParts, manifest_uri
from pipeline.steps import hash_ranges
from pipeline.steps.hash_ranges import (
    ENTRY_BYTES,
    ExtentPlace,
    Gathered,
    HashRange,
    cut_into_ranges,
    join_extents,
    put_extents,
    utterances_of,
)
from pipeline.steps.selection import select as selection
from tests.pipeline.steps.increments.nights import Nights
from tests.pipeline.steps.selection.test_select import CONFIG, record, select, write_buckets
from tests.small_corpus import local_store, serially

HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=30)


def hash_range(priorities: list[int], speakers: list[int]) -> HashRange:
    durations_ms = np.arange(1, len(priorities) + 1, dtype=np.int64)
    utterances = utterances_of(np.array(priorities, np.uint64), durations_ms)
    return HashRange(utterances, np.array(speakers, np.uint64))


@given(HASHES, HASHES, st.integers(1, 50))
def test_ranges_hold_all_in_order(
    priorities: list[int], speakers: list[int], num_ranges: int
) -> None:
    """Joined, the ranges are the sorted hashes, each with its own duration."""
    whole = hash_range(priorities, speakers)
    parts = cut_into_ranges(whole.utterances, whole.speakers, num_ranges)
    assert len(parts) == num_ranges
    joined = np.concatenate([part.utterances for part in parts])
    assert joined["priority"].tolist() == sorted(priorities)
    assert sorted(joined.tolist()) == sorted(whole.utterances.tolist())
    assert np.concatenate([part.speakers for part in parts]).tolist() == sorted(speakers)


@given(st.integers(0, 2**64 - 1), HASHES, HASHES, st.integers(1, 40))
def test_every_bucket_is_cut_at_the_same_values(
    shared: int, ours: list[int], theirs: list[int], num_ranges: int
) -> None:
    """A hash is in the same range of every bucket that has it, as utterance and as speaker."""
    places = []
    for others in (ours, theirs):
        whole = hash_range([shared, *others], [*others, shared])
        parts = cut_into_ranges(whole.utterances, whole.speakers, num_ranges)
        places.append(
            [number for number, part in enumerate(parts) if shared in part.utterances["priority"]]
        )
        places.append([number for number, part in enumerate(parts) if shared in part.speakers])
    assert places[0] == places[1] == places[2] == places[3]
    assert len(places[0]) == 1


EXTENTS = [b"first", b"", b"the third", b"\0" * 7]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ObjectStore, str]:
    """Return a store, and where an object goes; reads of damaged bytes wait for nothing."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return ObjectStore((str(tmp_path),)), join_uri(str(tmp_path), "object")


def read(store: ObjectStore, uri: str, number: int, count: int, num_bytes: int) -> bytes:
    return ExtentPlace(uri, num_bytes, number, count).read(store)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=12))
@settings(deadline=None)
def test_each_reader_gets_its_own_extent(extents: Sequence[bytes]) -> None:
    """Of any number and lengths, by one GET where it is empty or alone, else by two."""
    data = join_extents(extents)
    assert len(data) == ENTRY_BYTES * len(extents) + sum(map(len, extents))
    with TemporaryDirectory() as folder:
        store, uri = ObjectStore((folder,)), join_uri(folder, "object")
        store.put(uri, data)
        for number, extent in enumerate(extents):
            before = REQUESTS.total()
            assert read(store, uri, number, len(extents), len(data)) == extent
            is_one = len(extents) == 1 or not extent
            assert (REQUESTS.total() - before).get == (1 if is_one else 2)


def test_a_changed_byte_is_refused_by_its_reader(place: tuple[ObjectStore, str]) -> None:
    """Each byte of entries and extents is protected: one reader refuses it, and names the URI."""
    store, uri = place
    data = join_extents(EXTENTS)
    for changed in range(len(data)):
        store.put(uri, data[:changed] + bytes([data[changed] ^ 1]) + data[changed + 1 :])
        found = [attempt(store, uri, number, data) for number in range(len(EXTENTS))]
        (refused,) = (number for number in range(len(EXTENTS)) if found[number] != EXTENTS[number])
        said = str(found[refused])
        assert said.startswith(f"{uri}: extent {refused} of 4: ")
        assert "remove the folder scratch above it" in said


def attempt(store: ObjectStore, uri: str, number: int, data: bytes) -> bytes | str:
    """Return an extent, or what its reader says of the object."""
    try:
        return read(store, uri, number, len(EXTENTS), len(data))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("extents", [EXTENTS, [b"alone"], [b"", b""]])
def test_a_truncated_object_is_refused(
    place: tuple[ObjectStore, str], extents: Sequence[bytes]
) -> None:
    """Whatever is left of it, by every reader; so is a longer one."""
    store, uri = place
    data = join_extents(extents)
    for other in (*(data[:length] for length in range(len(data))), data + b"\0"):
        store.put(uri, other)
        for number in range(len(extents)):
            with pytest.raises(ValueError, match=f"{uri}: .* an object of {len(other)}, .* had"):
                read(store, uri, number, len(extents), len(data))


def test_extents_of_another_object_are_refused(place: tuple[ObjectStore, str]) -> None:
    """Another number of extents, in an object of the same size."""
    store, uri = place
    data = join_extents([b"", b"\0" * ENTRY_BYTES])
    store.put(uri, join_extents([b"", b"", b""]))
    with pytest.raises(ValueError, match=f"{uri}: extent 1 of 2: the entry is of extent 1 of 3"):
        read(store, uri, 1, 2, len(data))


@dataclass(frozen=True)
class DamagingStore(ObjectStore):
    """A store whose first answers to reads of ranges have a wrong byte."""

    num_damaged: int = 1
    answers: tuple[list[int], ...] = ([],)

    def fetch_range(self, uri: str, start: int, num_bytes: int) -> FetchedRange:
        """Read a range."""
        found = super().fetch_range(uri, start, num_bytes)
        self.answers[0].append(start)
        if len(self.answers[0]) > self.num_damaged:
            return found
        return FetchedRange(b"\1" + found.data[1:], found.object_bytes, found.etag)


def test_damage_on_the_way_is_read_again(place: tuple[ObjectStore, str]) -> None:
    """Three damaged answers cost three reads more."""
    store, uri = place
    data = join_extents(EXTENTS)
    store.put(uri, data)
    for number, extent in enumerate(EXTENTS):
        damaging = DamagingStore(store.allowed_prefixes, 3, ([],))
        assert read(damaging, uri, number, len(EXTENTS), len(data)) == extent
        assert len(damaging.answers[0]) == 3 + (2 if extent else 1)


STEP = "selection/unlabelled"
Run = tuple[ObjectStore, str, str]


def gathered(context: StepContext, num_objects: int, num_extents: int) -> Gathered:
    objects = [
        put_extents(
            *(context, f"task-{each}", ".x"),
            (b"%d %d" % (each, number) for number in range(num_extents)),
            Tally(),
        )
        for each in range(num_objects)
    ]
    return Gathered.of(context, objects, num_extents)


@pytest.mark.parametrize(("num_objects", "is_listed"), [(40, False), (41, True)])
def test_readers_get_their_extents_of_all_objects(
    context: StepContext, num_objects: int, is_listed: bool
) -> None:
    """In the objects' order; above 4,000 names in all tasks together they are listed once."""
    found = gathered(context, num_objects, 100)
    assert isinstance(found.objects, OutputsInParts) is is_listed
    before = REQUESTS.total()
    for number in (0, 57, 99):
        reader = pickle.loads(pickle.dumps(found))
        assert list(reader.read(number)) == [b"%d %d" % (n, number) for n in range(num_objects)]
    assert (REQUESTS.total() - before).get == 3 * (2 * num_objects + is_listed)


def test_a_task_with_a_listed_object_more_is_as_large(context: StepContext) -> None:
    """It carries the list's name."""
    few, many = (len(pickle.dumps(gathered(context, each, 1000))) for each in (5, 50))
    assert many <= few + 10


def test_of_no_objects_nothing_is_read(context: StepContext) -> None:
    """Nor stored."""
    before = REQUESTS.total()
    assert list(Gathered.of(context, [], 10_000).read(3)) == []
    assert REQUESTS.total() - before == type(before)()


def corpus(folder: Path) -> Run:
    """Sixteen buckets of forty records, two of which are in the next bucket, too."""
    store, run_uri, corpus_uri = local_store(folder)
    buckets = {}
    for name in range(16):
        own = [record(40 * name + number, name) for number in range(40)]
        twice = [record(40 * ((name + 1) % 16) + number, name) for number in range(2)]
        buckets[f"{name:02d}"] = [own, twice]
    write_buckets(store, corpus_uri, buckets)
    return store, run_uri, corpus_uri


def in_ranges(run: Run, num_ranges: int, distribute: Any = serially) -> Manifest:
    """Select half of a corpus with so many ranges of hashes."""
    config = replace(CONFIG, hours=640 / 3600, file_hours=100 / 3600)
    with mock.patch.object(selection, "num_ranges", return_value=num_ranges):
        return select(*run, config, distribute)


def test_objects_and_the_drivers_names_do_not_grow_with_buckets_times_ranges(
    tmp_path: Path,
) -> None:
    """Thirty ranges more are an object with duplicates, one of the index, and a commit each."""
    stored, passed = [], []
    for num_ranges in (10, 40):
        received = Counter[str]()

        def weighing(
            elements: Any, function: Any, description: str, received: Counter[str] = received
        ) -> list[Any]:
            results = serially(elements, function, description)
            received[description] += len(pickle.dumps(results))
            return results

        run = corpus(tmp_path / str(num_ranges))
        manifest = in_ranges(run, num_ranges, weighing)
        listed = [each.uri for each in run[0].list(join_uri(run[1], "selection"))]
        # A range may be without duplicates.
        stored.append(len([each for each in listed if not each.endswith(".duplicates")]))
        assert len(listed) - stored[-1] <= num_ranges
        passed.append(received)
        assert len(manifest.id_index) == num_ranges
    assert stored[1] - stored[0] == 2 * 30
    for description in ("index the buckets", "index the utterance ids"):
        assert passed[1][description] <= 1.02 * passed[0][description]


def test_listed_names_select_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the byte, with duplicates, in seven ranges."""
    carried = in_ranges(corpus(tmp_path / "carried"), 7)
    assert carried.quarantined.utterances == 32
    monkeypatch.setattr(hash_ranges, "MAX_CARRIED", 0)
    run = corpus(tmp_path / "listed")
    assert in_ranges(run, 7).to_bytes() == carried.to_bytes()
    parts = [each for each in run[0].list(run[1]) if "/gathered-000000-" in each.uri]
    assert len(parts) == 3, "hashes, ids and duplicates"


def test_listed_names_extend_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An increment with ids that its base has selected, in many ranges."""
    found = []
    for bound in (4_000, 0):
        monkeypatch.setattr(hash_ranges, "MAX_CARRIED", bound)
        nights = Nights.at(str(tmp_path / str(bound)))
        nights.add(1, ["ann", "bert", "clara"])
        with mock.patch.object(selection, "num_ranges", return_value=4):
            nights.select("night-1")
            nights.extract("night-1")
            nights.add(2, ["ann", "bert"])
            nights.put(2, [nights.record(1, "ann", 0), nights.record(1, "clara", 1)], "again")
            manifest = nights.select("night-2", "night-1")
        features = nights.extract("night-2")
        assert manifest.quarantined.utterances == 2
        outputs = (*manifest.outputs, *manifest.ledgers, *manifest.id_index)
        found.append([each.sha256 for each in (*outputs, *features.stream_means)])
    assert found[0] == found[1]


def scratch_context(store: ObjectStore, run_uri: str) -> StepContext:
    """Return the context of a selection's scratch, which its commits know."""
    uri = join_uri(run_uri, STEP, "scratch/commits/selected-bucket-00.json")
    commit = Commit.from_bytes(store.get(uri))
    return StepContext(store, run_uri, f"{STEP}/scratch", commit.fingerprint, dict(commit.versions))


def test_the_remedy_for_a_damaged_object_works(tmp_path: Path) -> None:
    """A selection that resumes refuses it by its URI; without scratch, it makes the same bytes."""
    run = corpus(tmp_path)
    store, run_uri, _ = run
    manifest = in_ranges(run, 3)
    store.delete(manifest_uri(run_uri, STEP))
    scratch = scratch_context(store, run_uri)
    store.delete(scratch.commit_uri("ids-00001"))
    (output,) = committed_tasks(scratch)["gathered-ids-of-bucket-05"].outputs
    uri = output.uri(run_uri)
    data = store.get(uri)
    store.put(uri, data[:60] + bytes([data[60] ^ 1]) + data[61:])
    with pytest.raises(ValueError, match=f"{uri}: extent 1 of 3: .* remove the folder scratch"):
        in_ranges(run, 3)
    for each in store.list(join_uri(run_uri, STEP, "scratch")):
        store.delete(each.uri)
    assert in_ranges(run, 3).to_bytes() == manifest.to_bytes()
