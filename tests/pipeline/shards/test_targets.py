"""Stored targets: the k best at all three offsets in one array, and columns that are drawn."""

import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.filterbank import NUM_BINS, STACK
from pipeline.kbest import KBest, select_kbest
from pipeline.runs.manifest import read_output
from pipeline.runs.names import PARTITIONS_STEP, TARGETS_STEP
from pipeline.settings import Offsets, RepartitionConfig, TargetsConfig
from pipeline.shards import (
    KBestAtAllOffsets,
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
from pipeline.shards.targets import StoredForm, num_stored_rows
from pipeline.splicing import low_rate_alignment, num_low_rate_frames
from pipeline.steps.repartition import SpilledRows, repartition
from pipeline.steps.targets import TeacherInput, generate_targets, tail_seed
from tests.four_steps import rows_of
from tests.small_corpus import serially
from tests.small_run import SEED, copy_run, make_run, outputs
from tests.training.data.partition_rows import row_at_all_offsets


def of_middles(num_frames: int) -> list[KBest]:
    """By offset, targets whose senone is the number of their middle frame."""
    frames = np.arange(num_frames, dtype=np.uint16)
    middles = [low_rate_alignment(frames, offset)[:, np.newaxis] for offset in range(STACK)]
    return [
        KBest(each, np.zeros_like(each, np.float16), each[:, 0].astype(np.float16))
        for each in middles
    ]


@given(st.one_of(st.integers(0, 7), st.integers(0, 400)))
def test_row_j_has_its_middle_at_frame_j_plus_1(num_frames: int) -> None:
    """All frames but the first and last are a middle, each once; offsets are views of the rows."""
    parts = of_middles(num_frames)
    stored = KBestAtAllOffsets.of(parts)
    assert stored.kbest.senones[:, 0].tolist() == list(range(1, num_frames - 1))
    assert len(stored.kbest.log_z) == num_stored_rows(num_frames, 2, "all")
    for offset, part in enumerate(parts):
        found = stored.at(offset)
        assert np.array_equal(found.senones, part.senones)
        assert np.array_equal(found.log_z, part.log_z)
        assert np.shares_memory(found.senones, stored.kbest.senones) or not len(part.log_z)
        assert num_stored_rows(num_frames, offset, "one") == num_low_rate_frames(num_frames, offset)


def test_a_shard_has_one_kind_of_offsets() -> None:
    """A row at one offset among rows at all would be read as damage."""
    stored = KBestAtAllOffsets.of(of_middles(9))
    with pytest.raises(ValueError, match=r"offsets = .*: need one for the whole shard"):
        StoredForm.of([stored, stored.at(0)])
    with pytest.raises(ValueError, match="offsets = 'some': need 'all', or none"):
        StoredForm.stated({"k": "5", "offsets": "some"})


def test_rows_of_another_number_of_frames_are_refused() -> None:
    """An utterance of 20 frames has 18 rows at all offsets."""
    cut = TargetRow("a", 1, KBestAtAllOffsets.of(of_middles(19)))
    (found,) = read_targets(write_targets([cut]))
    assert isinstance(found.kbest, KBestAtAllOffsets)
    assert found.kbest.kbest.senones[:, 0].tolist() == list(range(1, 18))
    other = row_at_all_offsets(1, 20)
    with pytest.raises(ValueError, match=r"\(17, 1\): need uint16 \(18, 1\)"):
        write_partition([replace(other, targets=found.kbest)])


NUM_FRAMES = 20


def drawn(num_frames: int, tail_samples: int = 2, seed: int = 1) -> KBest:
    logits = np.random.default_rng(num_frames).normal(size=(num_frames, 30)).astype(np.float32)
    return select_kbest(logits, 5, tail_samples, seed)


def at_all(tail_samples: int = 2) -> KBestAtAllOffsets:
    counts = (num_low_rate_frames(NUM_FRAMES, offset) for offset in range(3))
    return KBestAtAllOffsets.of([drawn(count, tail_samples) for count in counts])


def partition_row(targets: StoredKBest) -> PartitionRow:
    features = np.ones((NUM_FRAMES, NUM_BINS), np.float16)
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


def test_a_shard_has_one_number_of_draws() -> None:
    """And a footer states one below k."""
    with pytest.raises(ValueError, match=r"tail_samples = \[0, 2\]: need one for the whole shard"):
        StoredForm.of([drawn(4), drawn(4, 0)])
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
    for each in rows.values():
        kbest = (
            each.kbest.at(each.offset) if isinstance(each.kbest, KBestAtAllOffsets) else each.kbest
        )
        seed = tail_seed(SEED, each.utterance_id, each.offset)
        assert_same(kbest, drawn(len(kbest.log_z), seed=seed))
    shutil.rmtree(Path(run_uri) / PARTITIONS_STEP)
    repartition(store, run_uri, RepartitionConfig(5 / 3600, 2, SEED), serially)
    for joined in rows_of(store, run_uri, "partitions"):
        assert_same(stored_rows(joined.targets), stored_rows(rows[joined.utterance_id].kbest))


def test_the_recipes_draws_are_below_k() -> None:
    """The error names the number, the bound and k."""
    with pytest.raises(ValueError, match=r"tail_samples = 4: need 0\.\.3, below k = 4"):
        TargetsConfig(4, 100, SEED, tail_samples=4)
