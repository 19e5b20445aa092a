"""Records of the device pool's benchmarks give busy shares, makespans and batches."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.device_pool.bare_loop import bare_record, pool_record
from tests.benchmarks.device_pool.workload import (
    Record,
    Span,
    covered,
    lengths,
    num_frames,
    read_payloads,
    utterances,
    write_files,
)


def write_steps(file: Path, *steps: tuple[str, float, float]) -> None:
    lines = [["loaded", 0.0, 0.0, []], *([*step, [1, 2]] for step in steps)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_overlapping_steps_count_once() -> None:
    """A server prepares one batch while another computes."""
    spans = [Span(4, 6, ()), Span(0, 2, ()), Span(1, 3, ()), Span(1.5, 2.5, ())]
    assert covered(spans) == 5


def test_busy_shares_are_of_the_makespan(tmp_path: Path) -> None:
    """One worker is busy for 8 s of 10, the other for 3; a model load is no work."""
    write_steps(tmp_path / "a.jsonl", ("prepare", 5, 6), ("compute", 6, 9), ("finish", 11, 15))
    write_steps(tmp_path / "b.jsonl", ("prepare", 7, 8), ("compute", 8, 9.5), ("finish", 9.5, 10))
    record = Record.read(tmp_path)
    assert (record.num_loads, record.makespan, record.first_target) == (2, 10, 10)
    assert record.busy_share(2) == pytest.approx(11 / 20)
    assert record.batches == {"a": [(1, 2)], "b": [(1, 2)]}


def test_lengths_are_skewed_and_files_hold_all(tmp_path: Path) -> None:
    """The mean is a third above the median; each utterance is in one file, by its number."""
    drawn = lengths(2000)
    assert 1.3 < np.mean(drawn) / np.median(drawn) < 1.7
    assert min(drawn) == 10
    assert 2000 < max(drawn) <= 2500
    files = write_files(tmp_path, 7, 3)
    found = sorted(num_frames(each) for file in files for each in read_payloads(file))
    assert found == sorted(len(each.frames) for each in utterances(7))


@pytest.mark.chaos
def test_a_bare_loop_repeats_the_pools_batches() -> None:
    """Each utterance once, in the same batches and order, on each of two devices."""
    devices = ["cpu#0", "cpu#1"]
    pool = pool_record(40, devices)
    computed = sorted(
        number for each in pool.batches.values() for batch in each for number in batch
    )
    assert computed == list(range(40))
    bare = bare_record(40, pool, devices[: len(pool.batches)])
    assert list(bare.batches.values()) == list(pool.batches.values())
    assert 0 < bare.busy_share(2) <= 1
