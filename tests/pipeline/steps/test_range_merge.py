"""A gathering task stores one object, which is listed once, however many tasks read it."""

import pickle
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from infra.store.object_store import ObjectStore, join_uri
from infra.task_metrics import REQUESTS
from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext, committed_tasks
from pipeline.runs.manifest import Manifest, manifest_uri
from pipeline.runs.outputs import OutputsInParts
from pipeline.steps import hash_ranges
from pipeline.steps.hash_ranges import Gathered, put_extents
from pipeline.steps.selection import select as selection
from tests.pipeline.runs.small_commits import context
from tests.pipeline.steps.increments.nights import Nights
from tests.pipeline.steps.selection.test_select import CONFIG, record, select, write_buckets
from tests.small_corpus import local_store, serially

__all__ = ["context"]

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
    """To the byte, with duplicates, in one range and in many."""
    for num_ranges in (1, 7):
        carried = in_ranges(corpus(tmp_path / f"carried-{num_ranges}"), num_ranges)
        assert carried.quarantined.utterances == 32
        with monkeypatch.context() as patch:
            patch.setattr(hash_ranges, "MAX_CARRIED", 0)
            run = corpus(tmp_path / f"listed-{num_ranges}")
            assert in_ranges(run, num_ranges).to_bytes() == carried.to_bytes()
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


def test_what_an_earlier_version_gathered_is_gathered_again(tmp_path: Path) -> None:
    """It named an object a range; half-finished by it, the selection is that of this version."""
    run = corpus(tmp_path)
    store, run_uri, _ = run
    manifest = in_ranges(run, 3)
    store.delete(manifest_uri(run_uri, STEP))
    scratch = scratch_context(store, run_uri)
    for name, commit in committed_tasks(scratch).items():
        if name.startswith("gathered-"):
            store.delete(scratch.commit_uri(name))
            before = name.removeprefix("gathered-")
            store.put(
                scratch.commit_uri(before),
                replace(commit, task=before, outputs=commit.outputs * 3).to_bytes(),
            )
    assert in_ranges(run, 3).to_bytes() == manifest.to_bytes()


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
