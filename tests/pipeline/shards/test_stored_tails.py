"""Targets whose last columns are drawn: in shards, on disk between steps, and through all steps."""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.kbest import KBest, select_kbest
from pipeline.runs.manifest import read_output
from pipeline.runs.names import PARTITIONS_STEP, TARGETS_STEP
from pipeline.shards import (
    KBestAtAllOffsets,
    Offsets,
    PartitionRow,
    StoredKBest,
    TargetRow,
    read_partition,
    read_targets,
    stored_rows,
    write_partition,
    write_targets,
)
from pipeline.shards.container import read_plain_columns
from pipeline.shards.targets import StoredForm, footer_of
from pipeline.splicing import num_low_rate_frames
from pipeline.steps.repartition import RepartitionConfig, SpilledRows, repartition
from pipeline.steps.targets import TargetsConfig, TeacherInput, generate_targets, tail_seed
from tests.small_corpus import serially
from tests.small_run import SEED, copy_run, make_run, outputs

NUM_FRAMES = 20


def drawn(num_frames: int, tail_samples: int = 2, seed: int = 1) -> KBest:
    logits = np.random.default_rng(num_frames).normal(size=(num_frames, 30)).astype(np.float32)
    return select_kbest(logits, 5, tail_samples, seed)


def at_all(tail_samples: int = 2) -> KBestAtAllOffsets:
    counts = (num_low_rate_frames(NUM_FRAMES, offset) for offset in range(3))
    return KBestAtAllOffsets.of([drawn(count, tail_samples) for count in counts])


def partition_row(targets: StoredKBest) -> PartitionRow:
    features = np.ones((NUM_FRAMES, 64), np.float16)
    return PartitionRow("u1", "s1", 10 * NUM_FRAMES, None, features, targets, 1)


def assert_same(found: KBest, expected: KBest) -> None:
    assert found.tail_samples == expected.tail_samples
    for name in ("senones", "logits", "log_z"):
        assert getattr(found, name).tobytes() == getattr(expected, name).tobytes()


TARGETS = [drawn(num_low_rate_frames(NUM_FRAMES, 1)), at_all()]


@pytest.mark.parametrize("targets", TARGETS, ids=["one", "all"])
def test_shards_and_spilled_rows_give_back_what_was_drawn(targets: StoredKBest) -> None:
    """Byte for byte, with the number of columns; writing again gives the same shard."""
    data = write_targets([TargetRow("u1", 1, targets)])
    (row,) = read_targets(data)
    assert_same(stored_rows(row.kbest), stored_rows(targets))
    assert write_targets([row]) == data
    stored = write_partition([partition_row(targets)])
    _, footer = read_plain_columns(stored, ["utterance_id"])
    assert (footer["k"], footer["tail_samples"]) == ("5", "2")
    (joined,) = read_partition(stored)
    spilled = SpilledRows()
    spilled.extend([joined])
    for found in (joined, spilled.load(0)):
        assert type(found.targets) is type(targets)
        assert isinstance(found.targets, KBest | KBestAtAllOffsets)
        assert_same(stored_rows(found.targets), stored_rows(targets))


def test_offsets_keep_the_columns() -> None:
    """Each offset of a row at all three is what was interleaved."""
    for offset in range(3):
        expected = drawn(num_low_rate_frames(NUM_FRAMES, offset))
        assert_same(at_all().at(offset), expected)


def test_shards_without_draws_state_nothing_new() -> None:
    """Their bytes are those from before there were draws."""
    entries = footer_of([drawn(4, 0)])
    assert entries == {"k": "5"}
    assert StoredForm.stated(entries) == StoredForm(5, 0, "one")


def test_a_shard_has_one_number_of_draws() -> None:
    """And a footer states one below k."""
    with pytest.raises(ValueError, match=r"tail_samples = \[0, 2\]: need one for the whole shard"):
        footer_of([drawn(4), drawn(4, 0)])
    for stated in ("0", "-1", "x", "123456"):
        with pytest.raises(ValueError, match=f"tail_samples = '{stated}': need a count"):
            StoredForm.stated({"k": "5", "tail_samples": stated})
    with pytest.raises(ValueError, match=r"tail_samples = 5: need 0\.\.4, below k = 5"):
        StoredForm.stated({"k": "5", "tail_samples": "5"})


def test_a_tail_that_lies_is_not_written() -> None:
    """The columns of k best without draws are no tail."""
    lying = replace(drawn(4, 0), tail_samples=2)
    with pytest.raises(ValueError, match="u1: "):
        write_targets([TargetRow("u1", 1, lying)])


def teacher(inputs: Iterable[TeacherInput]) -> Iterator[KBest]:
    return (drawn(len(each.frames), seed=each.seed) for each in inputs)


@pytest.mark.parametrize("offsets", ["one", "all"])
def test_steps_draw_by_utterance_and_offset(tmp_path: Path, offsets: Offsets) -> None:
    """Requests of any size give the same shards, which partitions keep to the bit."""
    (tmp_path / "first").mkdir()
    store, run_uri = copy_run(make_run(tmp_path / "first")[1], tmp_path)
    shards = []
    for request_frames in (1, 500):
        shutil.rmtree(Path(run_uri) / TARGETS_STEP)
        config = TargetsConfig(5, request_frames, SEED, offsets, tail_samples=2)
        generate_targets(store, run_uri, config, teacher, serially)
        shards.append(
            [read_output(store, run_uri, each) for each in outputs(store, run_uri, "targets")]
        )
    assert shards[0] == shards[1]
    rows = {row.utterance_id: row for shard in shards[0] for row in read_targets(shard)}
    for row in rows.values():
        kbest = row.kbest.at(row.offset) if isinstance(row.kbest, KBestAtAllOffsets) else row.kbest
        seed = tail_seed(SEED, row.utterance_id, row.offset)
        assert_same(kbest, drawn(len(kbest.log_z), seed=seed))
    shutil.rmtree(Path(run_uri) / PARTITIONS_STEP)
    repartition(store, run_uri, RepartitionConfig(5 / 3600, 2, SEED), serially)
    for output in outputs(store, run_uri, "partitions"):
        for joined in read_partition(read_output(store, run_uri, output)):
            assert isinstance(joined.targets, KBest | KBestAtAllOffsets)
            assert_same(stored_rows(joined.targets), stored_rows(rows[joined.utterance_id].kbest))


def test_the_recipes_draws_are_below_k() -> None:
    """The error names the number, the bound and k."""
    with pytest.raises(ValueError, match=r"tail_samples = 4: need 0\.\.3, below k = 4"):
        TargetsConfig(4, 100, SEED, tail_samples=4)
