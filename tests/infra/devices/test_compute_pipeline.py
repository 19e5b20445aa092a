"""Batches through a device's three steps: what overlaps, and what happens when they fail."""

import threading
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from infra.devices import device_server
from infra.devices.device_server import (
    BatchWatch,
    ComputePipeline,
    FrameBudget,
    QueuedBatch,
    RequestQueue,
    is_out_of_memory,
)
from infra.devices.messages import PoolRequest

LIMIT_S = 20


class Device:
    """Device doubles numbers; it fails at poison, holds `memory` frames and notes its batches."""

    def __init__(self, memory: int = 10**9) -> None:
        self.memory = memory
        self.poison: set[bytes] = set()
        self.works = True
        self.batches: list[list[bytes]] = []
        self.computing = threading.Event()
        self.may_compute = threading.Event()
        self.may_compute.set()
        self.prepared: list[list[bytes]] = []
        self.passing: list[Exception] = []

    def check(self) -> None:
        if not self.works:
            raise OSError("device is gone")

    def prepare(self, payloads: Sequence[bytes | memoryview]) -> list[bytes]:
        self.prepared.append([bytes(each) for each in payloads])
        return self.prepared[-1]

    def compute(self, prepared: list[bytes]) -> list[bytes]:
        self.computing.set()
        assert self.may_compute.wait(LIMIT_S)
        self.batches.append(prepared)
        if 10 * len(prepared) > self.memory:
            raise MemoryError("too many frames")
        if self.passing:
            raise self.passing.pop()
        if poisoned := self.poison.intersection(prepared):
            raise ValueError(f"poison: {sorted(poisoned)}")
        return [each * 2 for each in prepared]

    def finish(self, computed: list[bytes]) -> list[bytes | Exception]:
        return [ValueError("NaN") if b"nan" in each else each for each in computed]


class Pipeline:
    """Pipeline runs batches of requests of ten frames through a device, and notes what is told."""

    def __init__(self, device: Device, max_frames: int = 1000) -> None:
        self.requests = RequestQueue()
        self.watch = BatchWatch(LIMIT_S)
        self.budget = FrameBudget(max_frames)
        self.answers: dict[int, list[bytes | str]] = {}
        self.failures: dict[int, tuple[str, bool]] = {}
        self.flushes: list[float] = []
        self.gave_up: list[str] = []
        parts = self.requests, self.budget, self.watch, self
        self.pipeline = ComputePipeline(device, *parts, self.gave_up.append)

    def taken(self, batch: QueuedBatch) -> None: ...

    def flush(self, limit_s: float) -> None:
        self.flushes.append(limit_s)

    def answered(self, batch: QueuedBatch, answers: Sequence[bytes | Exception]) -> None:
        assert batch.number not in self.answers
        self.answers[batch.number] = [
            each if isinstance(each, bytes) else str(each) for each in answers
        ]

    def failed(self, batch: QueuedBatch, reason: str, out_of_memory: bool) -> None:
        assert batch.number not in self.failures
        self.failures[batch.number] = reason, out_of_memory

    def put(self, number: int, payloads: Sequence[bytes], is_isolated: bool = False) -> None:
        requests = [PoolRequest(10, each) for each in payloads]
        self.requests.put(QueuedBatch(0, number, requests, is_isolated))

    def run(self, batches: Sequence[Sequence[bytes]]) -> dict[int, list[bytes | str]]:
        for number, payloads in enumerate(batches):
            self.put(number, payloads)
        self.pipeline.start()
        self.wait_for(len(batches))
        return self.answers

    def wait_for(self, count: int) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while len(self.answers) + len(self.failures) < count:
            assert time.monotonic() < deadline_s
            time.sleep(0.002)


def test_each_batch_is_computed_as_it_came() -> None:
    """However small: others that wait would change the last bits of its answers."""
    device = Device()
    batches = [[f"{number}-{each}".encode() for each in range(number)] for number in range(1, 8)]
    answers = Pipeline(device).run(batches)
    assert device.batches == batches
    assert answers == {number: [each * 2 for each in one] for number, one in enumerate(batches)}


def test_the_next_batch_is_ready_while_one_computes() -> None:
    """Two more batches are prepared at most, so that a device's memory is bounded."""
    device = Device()
    device.may_compute.clear()
    pipeline = Pipeline(device)
    for number in range(8):
        pipeline.put(number, [b"x"])
    pipeline.pipeline.start()
    assert device.computing.wait(LIMIT_S)
    time.sleep(0.2)
    assert len(device.prepared) == 3
    assert device.batches == []
    device.may_compute.set()
    pipeline.wait_for(8)


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_server, "_SECOND_TRY_AFTER_S", 0.0)


@pytest.mark.usefixtures("no_pause")
def test_a_batch_that_does_not_fit_is_tried_twice() -> None:
    """Of batches that are as large none is tried for a while; smaller ones are, and single ones."""
    device = Device(memory=30)
    pipeline = Pipeline(device)
    pipeline.run([[b"x"] * 5])
    for number, size in enumerate((3, 5, 4, 1), start=1):
        pipeline.put(number, [b"x"] * size)
    pipeline.wait_for(5)
    assert Counter(map(len, device.batches)) == {5: 2, 3: 1, 4: 2, 1: 1}
    assert pipeline.answers.keys() == {1, 4}
    assert {number: oom for number, (_, oom) in pipeline.failures.items()} == {
        0: True,
        2: True,
        3: True,
    }
    assert pipeline.failures[0][0] == "MemoryError: too many frames"
    assert pipeline.budget.num_frames == 39


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize("error", [MemoryError("busy"), ValueError("busy")])
def test_a_fault_that_passes_changes_no_batch(error: Exception) -> None:
    """What fails beside others is computed again as it was, alone in the device."""
    device = Device()
    device.passing = [error]
    pipeline = Pipeline(device)
    answers = pipeline.run([[b"a", b"b"], [b"c"]])
    assert answers == {0: [b"aa", b"bb"], 1: [b"cc"]}
    assert pipeline.failures == {}
    assert pipeline.budget.num_frames == 1000


def test_a_batch_that_fails_twice_is_its_clients() -> None:
    """The client is told why, and the batches beside it are answered."""
    device = Device()
    device.poison = {b"b"}
    pipeline = Pipeline(device)
    assert pipeline.run([[b"a", b"b"], [b"c"]]) == {1: [b"cc"]}
    assert pipeline.failures == {0: ("ValueError: poison: [b'b']", False)}
    assert device.batches.count([b"a", b"b"]) == 2


def test_a_device_that_computes_nothing_any_more_is_given_up() -> None:
    """After a failure it must compute something small; else it is no utterance's fault."""
    device = Device()
    device.poison, device.works = {b"x"}, False
    pipeline = Pipeline(device)
    pipeline.run([[b"x"]])
    assert pipeline.gave_up[0] == "ValueError: poison: [b'x']; then OSError: device is gone"


def test_an_isolated_batch_is_alone_in_the_device() -> None:
    """What was before it is answered, and what comes after is not begun."""
    device = Device()
    pipeline = Pipeline(device)
    pipeline.run([[b"x"]] * 4)
    device.may_compute.clear()
    device.prepared.clear()
    pipeline.put(4, [b"poison"], is_isolated=True)
    pipeline.put(5, [b"y"])
    time.sleep(0.2)
    assert device.prepared == [[b"poison"]]
    device.may_compute.set()
    pipeline.wait_for(6)
    assert 1.0 in pipeline.flushes


def test_too_few_answers_fail_the_batch() -> None:
    """No request gets another's answer."""
    device = Device()
    device.finish = lambda computed: computed[:1]  # type: ignore[method-assign]
    pipeline = Pipeline(device)
    assert pipeline.run([[b"a", b"b"], [b"c"]]) == {1: [b"cc"]}
    assert pipeline.failures == {0: ("ValueError: 1 answers: need 2, one a request", False)}


class OutOfMemoryError(RuntimeError):
    """Named as torch's own."""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), True),
        (RuntimeError("size mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_errors_of_memory_are_known(error: Exception, expected: bool) -> None:
    """By torch's class and texts; a ValueError that speaks of memory is none."""
    assert is_out_of_memory(error) is expected


def test_the_budget_is_what_fits_and_regrows_slowly() -> None:
    """It needs 256 good batches for an eighth more, and never passes its maximum."""
    budget = FrameBudget(1000)
    budget.shrink(401)
    budget.shrink(801)
    assert budget.num_frames == 400
    for _ in range(255):
        budget.grow()
    assert budget.num_frames == 400
    budget.grow()
    assert budget.num_frames == 451
    for _ in range(256 * 40):
        budget.grow()
    assert budget.num_frames == 1000
    budget.shrink(1)
    assert budget.num_frames == 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_stuck_batch_is_noticed_by_the_pace_of_others(clock: list[float]) -> None:
    """The first has the limit of a start; later ones 20 times the slowest, and 20 s at least."""
    watch = BatchWatch(600.0)
    watch.begin(0, 100)
    clock[0] += 599
    assert watch.overdue() == ""
    clock[0] += 2
    assert "a batch of 100 frames takes 601 s: the limit is 600 s" in watch.overdue()
    watch = BatchWatch(600.0)
    watch.begin(0, 100)
    watch.begin(1, 100)
    clock[0] += 2
    watch.end(0)
    clock[0] += 39
    assert watch.overdue() == ""
    clock[0] += 2
    assert "takes 41 s: the limit is 40 s" in watch.overdue()
    watch.end(1)
    clock[0] += 1000
    assert watch.overdue() == ""
    watch.begin(2, 1)
    clock[0] += 19
    assert watch.overdue() == ""
    clock[0] += 2
    assert "the limit is 20 s" in watch.overdue()
