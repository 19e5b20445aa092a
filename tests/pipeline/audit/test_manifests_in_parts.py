"""A run whose manifests come in parts is the small run, and is verified and traced as it is."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore, join_uri
from infra.task_metrics import REQUESTS
from jobs.run_table import utterance_reads
from pipeline.audit.trace import trace
from pipeline.audit.verify import Verification, sweep, verify_run
from pipeline.runs.manifest import Manifest, OutputsInParts, read_manifest
from tests.pipeline.runs.small_commits import set_small_bounds
from tests.small_run import SUBSET, copy_run, make_run, selected_ids, spoilt
from tests.whole_path.processes import TINY
from training.settings.recipe import read_recipe

Run = tuple[ObjectStore, str]

READS = utterance_reads(read_recipe(str(TINY)))
STEPS = ("selection", "features", "targets", "partitions")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The same run, in waves, groups and parts of a few tasks."""
    with pytest.MonkeyPatch.context() as patch:
        set_small_bounds(patch, max_listed=2)
        yield make_run(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def run(whole: Run, tmp_path: Path) -> Run:
    """A copy to damage."""
    return copy_run(whole[1], tmp_path)


def manifest_of(run: Run, step: str) -> Manifest:
    return read_manifest(*run, f"{step}/{SUBSET}")


def verify(run: Run) -> Verification:
    return verify_run(*run, join_uri(run[1], "corpus"), lambda *_: None)


def first_part(run: Run, step: str) -> str:
    found = manifest_of(run, step).outputs
    assert isinstance(found, OutputsInParts)
    return found.parts[0].key


def test_all_four_steps_make_the_objects_of_the_small_run(small: Run, whole: Run) -> None:
    """In the same order, with the same totals; digests of inputs differ, as manifests do."""
    for step in STEPS:
        plain, parted = (manifest_of(each, step) for each in (small, whole))
        assert isinstance(plain.outputs, tuple)
        assert isinstance(parted.outputs, OutputsInParts)
        assert len(parted.outputs) > 2
        same = {"outputs": tuple(parted.outputs), "ledgers": tuple(parted.ledgers)}
        if step == "features":  # sums of groups
            assert parted.statistics["moments"].keys() == plain.statistics["moments"].keys()
            same["statistics"] = plain.statistics
        if step == "targets":
            mass = [each.statistics["mean_retained_mass"] for each in (parted, plain)]
            assert mass[0] == pytest.approx(mass[1], rel=1e-12)
            same["statistics"] = plain.statistics
        assert replace(parted, inputs=plain.inputs, **same).to_bytes() == plain.to_bytes()  # type: ignore[arg-type]


def test_it_is_verified_and_its_parts_are_no_orphans(whole: Run) -> None:
    """Each object that the parts list is read, and each task's means of its streams."""
    found = verify(whole)
    assert (found.findings, found.orphans, found.unfinished) == ((), (), ())
    manifests = [manifest_of(whole, step) for step in STEPS]
    listed = sum(
        len(each.outputs) + len(each.ledgers) + len(each.id_index) + len(each.stream_means)
        for each in manifests
    )
    num_means = len(manifest_of(whole, "features").outputs)  # a file and shard a task
    assert found.num_objects == listed + num_means


@pytest.mark.parametrize(
    ("step", "damage"), [("features", "flipped"), ("selection", "gone"), ("partitions", "gone")]
)
def test_a_damaged_part_is_found(run: Run, step: str, damage: str) -> None:
    """With the remedy; nothing of its step is taken for an orphan meanwhile."""
    store, run_uri = run
    uri = join_uri(run_uri, key := first_part(run, step))
    data = store.get(uri)
    if damage == "flipped":
        store.put(uri, data[:50] + bytes([data[50] ^ 1]) + data[51:])
    else:
        store.delete(uri)
    found = verify(run)
    assert found.findings[0].object == key
    assert "remove" in found.findings[0].remedy
    assert "manifest.json and run the step again" in found.findings[0].remedy
    assert found.orphans == ()


def test_parts_that_no_manifest_names_are_swept(run: Run) -> None:
    """Those of a driver that was killed before its manifest, and whose step ended otherwise."""
    store, run_uri = run
    key = f"features/{SUBSET}/ab/outputs-000000-{'ab' * 8}.outputs"
    store.put(join_uri(run_uri, key), b"")
    found = verify(run)
    assert found.orphans == (key,)
    sweep(store, run_uri, found)
    assert verify(run).orphans == ()
    assert store.exists(join_uri(run_uri, first_part(run, "features")))


def test_its_utterances_are_traced(small: Run, whole: Run) -> None:
    """To the same objects and places."""
    for utterance_id in (selected_ids(*small)[0], spoilt(*small), selected_ids(*small)[-1]):
        one, other = (
            [
                (step.step, step.outcome, step.object, step.position)
                for step in trace(*each, join_uri(each[1], "corpus"), utterance_id, READS).steps
            ]
            for each in (small, whole)
        )
        assert [each[1:] for each in one[1:]] == [each[1:] for each in other[1:]]


def test_a_trace_reads_few_parts(
    small: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the features' list some, to find the shard's place; of every other list one at most."""
    set_small_bounds(monkeypatch, max_listed=1)
    run = make_run(tmp_path)
    parts = {step: len(manifest_of(run, step).parts) for step in STEPS}
    assert min(parts.values()) >= 4
    for utterance_id in selected_ids(*run)[2:]:
        more = requests_of_trace(run, utterance_id) - requests_of_trace(small, utterance_id)
        # The commits of three steps, a part of the selection's list, and some of the features'.
        assert more <= 3 + 1 + parts["features"]


def requests_of_trace(run: Run, utterance_id: str) -> int:
    before = REQUESTS.total()
    trace(*run, join_uri(run[1], "corpus"), utterance_id, READS)
    return (REQUESTS.total() - before).get
