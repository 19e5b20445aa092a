"""Targets at all three offsets: those at one are among them, and manifests say what they are."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from infra.store.object_store import ObjectStore
from pipeline.filterbank import STACK
from pipeline.kbest import KBest, OwnKBest
from pipeline.runs.engine import WITHOUT_LATTICE
from pipeline.runs.manifest import Manifest, read_manifest
from pipeline.runs.names import PARTITIONS_STEP, TARGETS_STEP
from pipeline.settings import RepartitionConfig, TargetsConfig
from pipeline.shards import KBestAtAllOffsets
from pipeline.splicing import splice
from pipeline.steps.repartition import repartition
from pipeline.steps.targets import generate_targets
from tests.four_steps import label, rows_of, teacher
from tests.in_process_teacher import teacher_of
from tests.small_corpus import serially
from tests.small_run import SEED, copy_run, make_run

ALL = TargetsConfig(4, 100, SEED, offsets="all")
PARTITIONS = RepartitionConfig(5 / 3600, 2, SEED)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[ObjectStore, str]:
    """A run of targets at one offset."""
    return make_run(tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def every(
    one: tuple[ObjectStore, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[ObjectStore, str]:
    """The same run with targets at all offsets."""
    store, run_uri = copy_run(one[1], tmp_path_factory.mktemp("all"))
    for step in (TARGETS_STEP, PARTITIONS_STEP):
        shutil.rmtree(Path(run_uri) / step)
    generate_targets(store, run_uri, ALL, teacher, serially)
    repartition(store, run_uri, PARTITIONS, serially)
    return store, run_uri


def manifest(run: tuple[ObjectStore, str], step: str) -> Manifest:
    return read_manifest(*run, step)


def assert_same(found: KBest, expected: KBest) -> None:
    for name in ("senones", "logits", "log_z"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))


def test_those_at_one_offset_are_among_them(
    one: tuple[ObjectStore, str], every: tuple[ObjectStore, str]
) -> None:
    """Bit by bit, at the offset that the seed draws; partitions hold what the targets do."""
    alone, together, joined = (
        {row.utterance_id: row for row in rows_of(*run, step)}
        for run, step in ((one, "targets"), (every, "targets"), (every, "partitions"))
    )
    assert alone.keys() == together.keys() == joined.keys()
    assert {row.offset for row in alone.values()} == {0, 1, 2}
    for name, row in together.items():
        assert row.offset == alone[name].offset == joined[name].offset
        expected, found, stored = alone[name].kbest, row.kbest, joined[name].targets
        assert isinstance(expected, KBest)
        assert isinstance(found, KBestAtAllOffsets)
        assert isinstance(stored, KBestAtAllOffsets)
        assert_same(found.at(row.offset), expected)
        assert_same(stored.kbest, found.kbest)


def test_each_offset_has_the_teachers_answer_at_it(every: tuple[ObjectStore, str]) -> None:
    """Of every utterance of every shard."""
    together = {row.utterance_id: row.kbest for row in rows_of(*every, "targets")}
    for row in rows_of(*every, "features"):
        found = together[row.utterance_id]
        assert isinstance(found, KBestAtAllOffsets)
        for offset in range(STACK):
            expected = label(splice(row.features, offset).astype(np.float32))
            assert_same(found.at(offset), expected)


def test_the_manifests_say_which(
    one: tuple[ObjectStore, str], every: tuple[ObjectStore, str]
) -> None:
    """Frames are counted at all offsets; partitions say what their targets were."""
    for made, offsets in ((one, "one"), (every, "all")):
        assert manifest(made, TARGETS_STEP).config["offsets"] == offsets
        assert manifest(made, PARTITIONS_STEP).statistics == {"offsets": offsets}
    num_frames = [len(row.features) for row in rows_of(*every, "partitions")]
    counted = manifest(every, TARGETS_STEP).statistics["num_frames"]
    assert counted == sum(count - 2 for count in num_frames)
    assert manifest(one, TARGETS_STEP).statistics["num_frames"] == pytest.approx(
        counted / 3, rel=0.01
    )


def test_the_other_setting_needs_another_run(every: tuple[ObjectStore, str]) -> None:
    """Targets that are there are not taken for others."""
    store, run_uri = every
    at_one = TargetsConfig(4, 100, SEED)
    with pytest.raises(ValueError, match="offsets: all -> one: use another --run"):
        generate_targets(store, run_uri, at_one, teacher, serially)


def test_an_utterance_without_lattice_at_an_offset_counts_once(
    every: tuple[ObjectStore, str], tmp_path: Path
) -> None:
    """At one of its offsets or at all three, whichever of them the search leaves without one."""

    def search(frames: np.ndarray) -> KBest:
        own = label(frames)
        without = OwnKBest.of(own, WITHOUT_LATTICE, "lattice_failed", "no path")
        return without if len(frames) % 2 else own

    searching = teacher_of(search)
    store, run_uri = copy_run(every[1], tmp_path)
    shutil.rmtree(Path(run_uri) / TARGETS_STEP)
    made = generate_targets(store, run_uri, ALL, searching, serially, loss_budget=0.99).manifest
    counts = [len(row.features) for row in rows_of(*every, "partitions")]
    failed = [num for num in counts if any((num - offset) // STACK % 2 for offset in range(STACK))]
    assert made.statistics["without_lattice"] == {"lattice_failed": len(failed)}
    assert 0 < len(failed) < len(counts)
