"""Batches through a device's three steps: what overlaps, and what happens when they fail."""

import threading
import time
from collections.abc import Sequence

import pytest

from infra.devices import compute_pipeline
from infra.devices.batch_watch import BatchWatch
from infra.devices.compute_pipeline import ComputePipeline
from infra.devices.frame_budget import FrameBudget, is_out_of_memory
from infra.devices.request_queue import Batch, Request, RequestQueue

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
        if poisoned := self.poison.intersection(prepared):
            raise ValueError(f"poison: {sorted(poisoned)}")
        return [each * 2 for each in prepared]

    def finish(self, computed: list[bytes]) -> list[bytes | Exception]:
        return [ValueError("NaN") if b"nan" in each else each for each in computed]


class Pipeline:
    """Pipeline runs requests of ten frames through a device, and notes what is delivered."""

    def __init__(self, device: Device, max_frames: int = 1000) -> None:
        self.requests = RequestQueue()
        self.watch = BatchWatch(LIMIT_S)
        self.budget = FrameBudget(max_frames)
        self.answers: dict[int, bytes | str] = {}
        self.deliveries: list[int] = []
        self.faults: list[tuple[int, str, bool]] = []
        self.flushes: list[float] = []
        self.gave_up: list[str] = []
        parts = self.requests, self.budget, self.watch, self
        self.pipeline = ComputePipeline(device, *parts, self.gave_up.append)

    def taken(self, batch: Batch) -> None: ...

    def flush(self, limit_s: float) -> None:
        self.flushes.append(limit_s)

    def answer(self, request: Request, body: bytes) -> None:
        self.deliveries.append(request.number)
        self.answers[request.number] = body

    def failure(self, request: Request, reason: str) -> None:
        self.deliveries.append(request.number)
        self.answers[request.number] = reason

    def fault(self, batch: Batch, reason: str, out_of_memory: bool) -> None:
        self.faults.append((len(batch.requests), reason, out_of_memory))

    def run(self, payloads: Sequence[bytes]) -> dict[int, bytes | str]:
        for number, payload in enumerate(payloads):
            self.requests.put(Request(0, number, 10, payload))
        self.pipeline.start()
        self.wait_for(len(payloads))
        return self.answers

    def wait_for(self, count: int) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        while len(self.answers) < count:
            assert time.monotonic() < deadline_s
            time.sleep(0.002)


def test_each_request_is_answered_once() -> None:
    """Fifty requests in batches of ten."""
    device = Device()
    pipeline = Pipeline(device, max_frames=100)
    payloads = [str(number).encode() for number in range(50)]
    assert pipeline.run(payloads) == {n: each * 2 for n, each in enumerate(payloads)}
    assert sorted(pipeline.deliveries) == list(range(50))
    assert len(device.batches) == 5


def test_the_next_batch_is_ready_while_one_computes() -> None:
    """Two more batches are prepared at most, so that a device's memory is bounded."""
    device = Device()
    device.may_compute.clear()
    pipeline = Pipeline(device, max_frames=10)
    for number in range(8):
        pipeline.requests.put(Request(0, number, 10, b"x"))
    pipeline.pipeline.start()
    assert device.computing.wait(LIMIT_S)
    time.sleep(0.2)
    assert len(device.prepared) == 3
    assert device.batches == []
    device.may_compute.set()
    pipeline.wait_for(8)


def test_out_of_memory_halves_the_budget_and_loses_nothing() -> None:
    """A device that holds thirty frames computes forty requests of ten, up to three at a time."""
    device = Device(memory=30)
    pipeline = Pipeline(device, max_frames=200)
    answers = pipeline.run([b"x"] * 40)
    assert set(answers.values()) == {b"xx"}
    assert 15 <= pipeline.budget.num_frames <= 30
    sizes = [len(each) for each in device.batches]
    assert sizes[0] == 20
    assert pipeline.faults[0] == (20, "MemoryError: too many frames", True)
    assert max(sizes[-10:]) <= 3


def test_a_request_that_never_fits_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is tried twice, as another process's memory may be free a moment later."""
    monkeypatch.setattr(compute_pipeline, "_SECOND_TRY_AFTER_S", 0.0)
    device = Device(memory=5)
    answers = Pipeline(device, max_frames=20).run([b"x", b"y"])
    assert answers == {0: "MemoryError: too many frames", 1: "MemoryError: too many frames"}
    assert device.batches.count([b"x"]) == 2


@pytest.mark.parametrize("poisoned", [(3,), (3, 4), (0, 31), tuple(range(32))])
def test_a_batch_that_fails_is_bisected(poisoned: tuple[int, ...]) -> None:
    """Of 32 requests those that fail alone are failures, and the others are answered."""
    device = Device()
    payloads = [str(number).encode() for number in range(32)]
    device.poison = {payloads[number] for number in poisoned}
    pipeline = Pipeline(device)
    answers = pipeline.run(payloads)
    # What fails alone is no fault of the device.
    assert {32} <= {size for size, _, _ in pipeline.faults} <= {2, 4, 8, 16, 32}
    assert not any(out_of_memory for _, _, out_of_memory in pipeline.faults)
    for number, payload in enumerate(payloads):
        poison = f"ValueError: poison: [{payload!r}]"
        assert answers[number] == (poison if number in poisoned else payload * 2)
    assert len(device.batches) <= 1 + 2 * 5 * len(poisoned)


def test_an_answer_that_is_an_error_is_tried_alone() -> None:
    """Its neighbours in the batch are answered at once, and once."""
    device = Device()
    pipeline = Pipeline(device)
    answers = pipeline.run([b"a", b"nan", b"b"])
    assert answers == {0: b"aa", 1: "ValueError: NaN", 2: b"bb"}
    assert device.batches == [[b"a", b"nan", b"b"], [b"nan"]]


def test_a_device_that_computes_nothing_any_more_is_given_up() -> None:
    """After a failure it must compute something small; else it is no utterance's fault."""
    device = Device()
    device.poison, device.works = {b"x"}, False
    pipeline = Pipeline(device)
    pipeline.run([b"x"])
    assert pipeline.gave_up == ["ValueError: poison: [b'x']; then OSError: device is gone"]


def test_an_isolated_batch_is_alone_in_the_device() -> None:
    """What was before it is answered, and what comes after is not begun."""
    device = Device()
    pipeline = Pipeline(device, max_frames=10)
    for number in range(4):
        pipeline.requests.put(Request(0, number, 10, b"x"))
    pipeline.pipeline.start()
    pipeline.wait_for(4)
    device.may_compute.clear()
    device.prepared.clear()
    pipeline.requests.put_batch(Batch([Request(0, 4, 10, b"poison")], is_isolated=True))
    pipeline.requests.put(Request(0, 5, 10, b"y"))
    time.sleep(0.2)
    assert device.prepared == [[b"poison"]]
    device.may_compute.set()
    pipeline.wait_for(6)
    assert 1.0 in pipeline.flushes


def test_too_few_answers_fail_the_batch() -> None:
    """No request gets another's answer."""
    device = Device()
    device.finish = lambda computed: computed[:1]  # type: ignore[method-assign]
    answers = Pipeline(device).run([b"a", b"b"])
    assert answers == {0: b"aa", 1: b"bb"}


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


def test_the_budget_regrows_slowly() -> None:
    """Halved twice, it needs 32 good batches for an eighth more, and never passes its maximum."""
    budget = FrameBudget(1000)
    budget.shrink(1000)
    budget.shrink(400)
    assert budget.num_frames == 200
    for _ in range(31):
        budget.grow()
    assert budget.num_frames == 200
    budget.grow()
    assert budget.num_frames == 226
    for _ in range(32 * 40):
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
