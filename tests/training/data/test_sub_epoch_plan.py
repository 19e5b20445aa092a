"""A sub-epoch's minibatches from any minibatch on, prefetched by a thread."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch

from infra.store.object_store import ObjectNotFound
from tests.training.data.partition_rows import dataset_in, row
from training.data import row_order
from training.data.dataset import SubEpochPlan
from training.data.minibatch import Minibatch
from training.data.sub_epochs import SubEpoch
from training.data.targets import HardTargets

NUM_PARTITIONS = 6


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SubEpochPlan:
    """Plan a sub-epoch of six shuffle buffers, each of one partition with ten utterances."""
    monkeypatch.setattr(row_order, "BUFFER_FRAMES", 100)
    parts = [[row(10 * part + n, 40 + 7 * n) for n in range(10)] for part in range(NUM_PARTITIONS)]
    dataset = dataset_in(tmp_path, labelled=parts)
    made = dataset.plan(SubEpoch(True, 0, 1, 1, False, 0.1), 0)
    assert len(made.pieces) == NUM_PARTITIONS
    return made


def equal(one: Minibatch, other: Minibatch) -> bool:
    """Whether two minibatches are the same to the bit."""
    assert isinstance(one.targets, HardTargets)
    assert isinstance(other.targets, HardTargets)
    return (
        torch.equal(one.features, other.features)
        and torch.equal(one.lengths, other.lengths)
        and torch.equal(one.targets.labels, other.targets.labels)
    )


def readers() -> list[str]:
    """Threads that read ahead."""
    return [each.name for each in threading.enumerate() if each.name.startswith("prefetch")]


def test_reading_ahead_changes_no_bit(plan: SubEpochPlan) -> None:
    """The minibatches are those of the buffers read one after the other, without a thread."""
    plainly = [
        minibatch
        for buffer, _ in plan.pieces
        for minibatch in plan.dataset.read(buffer).minibatches(buffer.batches(), plan.dataset.delay)
    ]
    ahead = list(plan.minibatches())
    assert len(plainly) == len(ahead) == plan.num_minibatches()
    assert all(map(equal, plainly, ahead))
    assert readers() == []


def test_a_plan_resumes_from_any_minibatch(plan: SubEpochPlan) -> None:
    """From the end on there are none."""
    whole = list(plan.minibatches())
    for start in range(len(whole) + 3):
        rest = list(plan.minibatches(start))
        assert len(rest) == len(whole[start:])
        assert all(map(equal, rest, whole[start:]))


def test_buffers_that_are_done_are_not_read(plan: SubEpochPlan, opened: list[str]) -> None:
    """Resuming in the fourth buffer reads three; at the end, nothing is read."""
    start = sum(len(numbers) for _, numbers in plan.pieces[:3]) + 1
    list(plan.minibatches(start))
    assert len(opened) == 3
    opened.clear()
    assert list(plan.minibatches(plan.num_minibatches())) == []
    assert opened == []


@pytest.mark.parametrize("buffers_ahead", [1, 3])
def test_so_many_buffers_are_prefetched_and_no_more(
    plan: SubEpochPlan, opened: list[str], buffers_ahead: int
) -> None:
    """While a buffer is trained on, the next come without being asked for, and wait."""
    minibatches = plan.minibatches(buffers_ahead=buffers_ahead)
    for done, (_, numbers) in enumerate(plan.pieces):
        next(minibatches)
        expected = min(done + 1 + buffers_ahead, NUM_PARTITIONS)
        deadline = time.monotonic() + 20
        while len(opened) < expected and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.01)
        assert len(opened) == expected
        for _ in numbers[1:]:
            next(minibatches)
        assert len(opened) == expected
    assert next(minibatches, None) is None


def test_closing_early_ends_the_thread(plan: SubEpochPlan) -> None:
    """Closed, dropped or left by an exception of the trainer's."""
    minibatches = plan.minibatches()
    next(minibatches)
    assert readers() != []
    minibatches.close()
    assert readers() == []

    def diverge(batches: Iterator[Minibatch]) -> None:
        for _ in batches:
            raise FloatingPointError("the loss is NaN")

    with pytest.raises(FloatingPointError):
        diverge(plan.minibatches())
    assert readers() == []


def test_an_error_of_the_store_reaches_the_trainer(plan: SubEpochPlan) -> None:
    """The error comes after the earlier buffers; it names the object and has its cause."""
    lost = plan.pieces[2][0].parts[0].output
    plan.dataset.store.delete(f"{plan.dataset.run_uri}/{lost.key}")
    minibatches = plan.minibatches()
    taken = list(islice(minibatches, sum(len(numbers) for _, numbers in plan.pieces[:2])))
    assert len(taken) > 2
    with pytest.raises(ObjectNotFound, match=lost.key) as raised:
        next(minibatches)
    assert isinstance(raised.value.__cause__, FileNotFoundError)
    assert readers() == []


def test_a_process_ends_though_its_minibatches_were_not_taken(tmp_path: Path) -> None:
    """The thread that reads ahead does not keep a trainer that failed from exiting."""
    program = """
import sys
from tests.training.data.partition_rows import dataset_in, row
from training.data import row_order
from training.data.sub_epochs import SubEpoch
row_order.BUFFER_FRAMES = 100
dataset = dataset_in(sys.argv[1], unlabelled=[[row(n, 400, True)] for n in range(5)])
plan = dataset.plan(SubEpoch(False, 0, 1, 0, False, 0.1), 0)
kept = plan.minibatches()
next(kept)
raise SystemExit(7)
"""
    done = subprocess.run([sys.executable, "-c", program, tmp_path], timeout=120, check=False)
    assert done.returncode == 7
