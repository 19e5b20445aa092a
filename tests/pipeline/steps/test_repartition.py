"""Repartition: groups, balance, mixing, and memory that does not grow with the group."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.filterbank import NUM_BINS
from pipeline.kbest import select_kbest
from pipeline.records import Tally
from pipeline.runs.manifest import Output, read_manifest, read_output
from pipeline.settings import RepartitionConfig
from pipeline.shards import PartitionRow, read_partition, write_partition
from pipeline.steps.repartition import (
    SpilledRows,
    balance,
    num_partitions,
    repartition,
    shard_groups,
)
from tests.small_corpus import local_store, serially
from tests.written_run import placement_of, write_run
from training.certificate import ProvenanceReader, read_provenance


def row(number: int, num_frames: int) -> PartitionRow:
    generator = np.random.default_rng(number)
    offset = number % 3
    logits = generator.normal(size=((num_frames - offset) // 3, 9)).astype(np.float32)
    return PartitionRow(
        utterance_id=f"utterance-{number}",
        speaker_id=f"speaker-{number % 4}",
        duration_ms=num_frames * 10,
        text=None,
        features=generator.normal(size=(num_frames, NUM_BINS)).astype(np.float16),
        targets=select_kbest(logits, 4),
        offset=offset,
    )


@given(st.integers(0, 300), st.integers(1, 20))
def test_groups_are_equal_within_one_and_never_above_g(num_shards: int, size: int) -> None:
    """Every shard once, in order; no last group of a single shard where others have sixteen."""
    groups = shard_groups(num_shards, size)
    assert [shard for group in groups for shard in group] == list(range(num_shards))
    sizes = {len(group) for group in groups}
    assert max(sizes, default=0) <= size
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    assert len(groups) == -(-num_shards // size)


@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=200), st.integers(1, 12))
def test_parts_are_equal_within_the_longest_row(durations: list[int], num_parts: int) -> None:
    """Every row in one part, in the given order."""
    order = np.random.default_rng(0).permutation(len(durations)).tolist()
    parts = balance(order, durations, num_parts)
    place = {row: number for number, row in enumerate(order)}
    assert sorted(row for part in parts for row in part) == list(range(len(durations)))
    assert all([place[row] for row in part] == sorted(place[row] for row in part) for part in parts)
    filled = [sum(durations[row] for row in part) for part in parts]
    assert max(filled) - min(filled) <= max(durations)


@given(st.floats(0.01, 500), st.sampled_from([0.25, 2.0]))
def test_partitions_have_about_their_hours(hours: float, partition_hours: float) -> None:
    """Within 1 +- 1/(2n); a group that makes one partition may have less."""
    tally = Tally(10**6, round(hours * 3_600_000))
    number = num_partitions(tally, RepartitionConfig(partition_hours, 4, 0))
    ratio = tally.hours / number / partition_hours
    assert ratio <= 1 + 1 / (2 * number) + 1e-9
    assert number == 1 or ratio >= 1 - 1 / (2 * number) - 1e-9


def test_spilled_rows_come_back_as_they_were() -> None:
    """Bit by bit, in any order."""
    rows = [replace(row(number, 20 + number), placement=f"DP{number}") for number in range(9)]
    spilled = SpilledRows()
    spilled.extend(rows[:4])
    spilled.extend(rows[4:])
    assert spilled.durations_ms == [each.duration_ms for each in rows]
    order = [8, 0, 3, 3, 7]
    back = write_partition([spilled.load(number) for number in set(order)])
    assert back == write_partition([rows[number] for number in set(order)])


def resident_bytes() -> int:
    """Memory of this process that is neither a file's nor swapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_spilled_rows_take_no_memory() -> None:
    """A hundred and sixty megabytes of rows leave less than a tenth of them resident."""
    long = row(0, 20_000)
    spilled = SpilledRows()
    spilled.extend([long])
    gc.collect()
    before = resident_bytes()
    spilled.extend(replace(long, features=long.features.copy()) for _ in range(64))
    assert resident_bytes() - before < 64 * long.features.nbytes / 10


def task_of(output: Output) -> int:
    """Return the number of the task that wrote an object."""
    return int(Path(output.key).name.partition("-")[0])


@pytest.mark.parametrize("num_source_shards", [1, 4, 16])
def test_partitions_draw_from_all_shards_of_their_group(
    tmp_path: Path, num_source_shards: int
) -> None:
    """Eleven files of 100 utterances: each partition holds some of every file of its group.

    Each row names its utterance's placement.
    """
    store, run_uri, _ = local_store(tmp_path)
    files = write_run(store, run_uri, num_files=11, num_speakers=4, num_each=25, seed=1)
    hours = read_manifest(store, run_uri, "features/unlabelled").tally_out.hours / 11
    repartition(store, run_uri, RepartitionConfig(hours, num_source_shards, 3), serially)
    shards = read_manifest(store, run_uri, "features/unlabelled").outputs
    groups = shard_groups(len(shards), num_source_shards)
    reader = ProvenanceReader(store, run_uri, read_provenance(store, run_uri))
    drawn = 0
    for output in read_manifest(store, run_uri, "partitions/unlabelled").outputs:
        rows = read_partition(read_output(store, run_uri, output))
        found = {files[each.utterance_id] for each in rows}
        assert found == {task_of(shards[shard]) for shard in groups[task_of(output)]}
        assert reader.read(output)["file"].tolist() == [files[each.utterance_id] for each in rows]
        assert all(each.placement == placement_of(each.utterance_id) for each in rows)
        assert output.tally.hours == pytest.approx(hours, rel=0.1)
        drawn += len(rows)
    assert drawn == len(files)


class CountedReads(tuple[Output, ...]):
    """Outputs that count how often all of them are read, as from the parts of a manifest."""

    reads = 0

    def __iter__(self) -> Iterator[Output]:
        self.reads += 1
        return super().__iter__()


def test_provenance_reads_its_lists_once_for_all_partitions(tmp_path: Path) -> None:
    """A certificate asks for thousands of partitions; each list of a large run is 100 objects."""
    store, run_uri, _ = local_store(tmp_path)
    write_run(store, run_uri, num_files=6, num_speakers=2, num_each=3, seed=1)
    repartition(store, run_uri, RepartitionConfig(1e-4, 2, 3), serially)
    stored = read_provenance(store, run_uri)
    selection, features = CountedReads(stored.selection), CountedReads(stored.features)
    counted = replace(stored, selection=selection, features=features)
    partitions = read_manifest(store, run_uri, "partitions/unlabelled").outputs
    reader = ProvenanceReader(store, run_uri, counted)
    for each in partitions:
        assert len(reader.read(each)) == each.utterances
    assert len(partitions) > 3
    assert (selection.reads, features.reads) == (1, 1)
