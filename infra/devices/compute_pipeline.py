"""Three threads that keep a device busy: one prepares a batch while others compute and answer."""

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from queue import Queue
from typing import Generic, Protocol, TypeVar

from infra.devices.batch_watch import BatchWatch
from infra.devices.batches import padded_frames
from infra.devices.frame_budget import FrameBudget, is_out_of_memory
from infra.devices.request_queue import QueuedBatch, RequestQueue

P = TypeVar("P")
C = TypeVar("C")
R = TypeVar("R")

_FLUSH_LIMIT_S = 0.01  # a client that does not read delays a batch no longer
_ISOLATED_FLUSH_LIMIT_S = 1.0
_SECOND_TRY_AFTER_S = 1.0  # another process's memory may be free by then
_TOO_LARGE = "out of memory: a batch of no more frames did not fit before"


class DeviceFunction(Protocol[P, C]):
    """DeviceFunction: what a server does with each batch of payloads, in three steps.

    An error of a step fails the batch. What `finish` returns as an error is of that payload alone.
    """

    def prepare(self, payloads: Sequence[bytes | memoryview]) -> P:
        """Decode the payloads and copy them to the device."""

    def compute(self, prepared: P) -> C:
        """Compute; a GPU may still be at it when this returns."""

    def finish(self, computed: C) -> Sequence[bytes | Exception]:
        """Wait for the device, and encode each payload's answer."""

    def check(self) -> None:
        """Free what memory can be freed, and raise unless the device computes something small."""


class Delivery(Protocol):
    """Delivery tells clients of their batches."""

    def taken(self, batch: QueuedBatch) -> None:
        """Tell that a batch is about to be computed."""

    def answered(self, batch: QueuedBatch, answers: Sequence[bytes | Exception]) -> None:
        """Send a batch's answers."""

    def failed(self, batch: QueuedBatch, reason: str, out_of_memory: bool) -> None:
        """Send why a batch cannot be computed as it is."""

    def flush(self, limit_s: float) -> None:
        """Wait until clients have all messages, at most so long."""


class ComputePipeline(Generic[P, C]):
    """ComputePipeline applies a device's function to the batches of a queue, in three threads.

    A batch is decoded and copied while the one before it computes, and answered while the next one
    does. It is computed as it came, since other company would change the last bits of its answers.
    If it fails it is tried once more, alone in the device; if it fails again, it is its client that
    divides it. Batches of as many frames as one that did not fit alone are not tried for a while.
    """

    def __init__(
        self,
        function: DeviceFunction[P, C],
        requests: RequestQueue,
        budget: FrameBudget,
        watch: BatchWatch,
        delivery: Delivery,
        give_up: Callable[[str], None],
    ) -> None:
        self._function = function
        self._requests = requests
        self._budget = budget
        self._watch = watch
        self._delivery = delivery
        self._give_up = give_up
        # A batch each between the steps, so that no step waits for its next one.
        self._prepared: Queue[_Work[P]] = Queue(maxsize=1)
        self._computed: Queue[_Work[C]] = Queue(maxsize=1)

    def start(self) -> None:
        """Start the threads, which end with the process."""
        for steps in (self._prepare_all, self._compute_all, self._finish_all):
            threading.Thread(target=steps, name=steps.__name__, daemon=True).start()

    def _prepare_all(self) -> None:
        for number in count():
            batch = self._requests.take()
            requests = batch.requests
            if len(requests) > 1 and padded_frames(requests) > self._budget.num_frames:
                self._delivery.failed(batch, _TOO_LARGE, out_of_memory=True)
                continue
            if batch.is_isolated:
                # What ends the server with it must not look like its fault, nor the reverse.
                self._watch.wait_until_idle()
                self._delivery.flush(_ISOLATED_FLUSH_LIMIT_S)
            self._watch.begin(number, batch.num_frames)
            self._delivery.taken(batch)
            # Clients must know by then what may end the server at once.
            self._delivery.flush(_ISOLATED_FLUSH_LIMIT_S if batch.is_isolated else _FLUSH_LIMIT_S)
            self._prepare(number, batch)
            if batch.is_isolated:
                self._watch.wait_until_idle()

    def _compute_all(self) -> None:
        while True:
            self._compute(self._prepared.get())

    def _finish_all(self) -> None:
        while True:
            self._finish(self._computed.get())

    # Each step's arrays end with its call: a batch is in a device's memory no longer than needed.
    def _prepare(self, number: int, batch: QueuedBatch) -> None:
        with self._trying_twice(number, batch):
            prepared = self._function.prepare([each.payload for each in batch.requests])
            self._prepared.put(_Work(number, batch, prepared))

    def _compute(self, work: "_Work[P]") -> None:
        with self._trying_twice(work.number, work.batch):
            computed = self._function.compute(work.content)
            self._computed.put(_Work(work.number, work.batch, computed))

    def _finish(self, work: "_Work[C]") -> None:
        with self._trying_twice(work.number, work.batch):
            answers = self._function.finish(work.content)
            count = len(work.batch.requests)
            if len(answers) != count:
                raise ValueError(f"{len(answers)} answers: need {count}, one a request")
            self._delivery.answered(work.batch, answers)
            self._budget.grow()
            self._watch.end(work.number)

    @contextmanager
    def _trying_twice(self, number: int, batch: QueuedBatch) -> Iterator[None]:
        """If a step fails, put the batch back to be alone, or if it was, tell its client.

        Gives the device up if it cannot compute anything small after a failure.
        """
        try:
            yield
            return
        except BaseException as error:
            traceback.print_exc()
            reason, out_of_memory = reason_of(error), is_out_of_memory(error)
        try:
            self._function.check()
        except BaseException as error:
            if not is_out_of_memory(error):
                self._give_up(f"{reason}; then {reason_of(error)}")
        if not batch.is_isolated:
            if out_of_memory:
                time.sleep(_SECOND_TRY_AFTER_S)
            self._requests.put_first(replace(batch, is_isolated=True))
        else:
            if out_of_memory:
                self._budget.shrink(padded_frames(batch.requests))
            self._delivery.failed(batch, reason, out_of_memory)
        self._watch.end(number)


@dataclass(frozen=True, slots=True, eq=False)
class _Work(Generic[R]):
    """_Work: a batch between two steps."""

    number: int
    batch: QueuedBatch
    content: R


def reason_of(error: BaseException) -> str:
    """Return an error's kind and text."""
    return f"{type(error).__name__}: {error}"
