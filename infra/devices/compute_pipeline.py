"""Three threads that keep a device busy: one prepares a batch while others compute and answer."""

import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from queue import Queue
from typing import Generic, Protocol, TypeVar

from infra.devices.batch_watch import BatchWatch
from infra.devices.frame_budget import FrameBudget, is_out_of_memory
from infra.devices.request_queue import Batch, Request, RequestQueue

P = TypeVar("P")
C = TypeVar("C")
R = TypeVar("R")

_FLUSH_LIMIT_S = 0.01  # a client that does not read delays a batch no longer
_ISOLATED_FLUSH_LIMIT_S = 1.0
_SECOND_TRY_AFTER_S = 1.0  # another process's memory may be free by then


class DeviceFunction(Protocol[P, C]):
    """DeviceFunction: what a server does with each batch of payloads, in three steps.

    An error of a step fails the batch, which is tried again in halves. What `finish` returns as an
    error fails that payload alone.
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
    """Delivery tells clients of their requests."""

    def taken(self, batch: Batch) -> None:
        """Tell that a batch's requests are about to be computed."""

    def answer(self, request: Request, body: bytes) -> None:
        """Send an answer."""

    def failure(self, request: Request, reason: str) -> None:
        """Send why a request failed that was alone in its batch."""

    def fault(self, batch: Batch, reason: str, out_of_memory: bool) -> None:
        """Tell that a batch failed as such, and is tried again."""

    def flush(self, limit_s: float) -> None:
        """Wait until clients have all messages, at most so long."""


class ComputePipeline(Generic[P, C]):
    """ComputePipeline applies a device's function to the batches of a queue, in three threads.

    A batch is chosen, decoded and copied while the one before it computes, and answered while the
    next one does. Out of memory halves the frame budget. A batch that fails otherwise is bisected,
    until the request that fails alone is answered by its error.
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
        self._tried_again: set[tuple[int, int]] = set()

    def start(self) -> None:
        """Start the threads, which end with the process."""
        for steps in (self._prepare_all, self._compute_all, self._finish_all):
            threading.Thread(target=steps, name=steps.__name__, daemon=True).start()

    def _prepare_all(self) -> None:
        for number in count():
            batch = self._requests.take(self._budget.num_frames)
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
    def _prepare(self, number: int, batch: Batch) -> None:
        with self._bisecting(number, batch):
            prepared = self._function.prepare([each.payload for each in batch.requests])
            self._prepared.put(_Work(number, batch, prepared))

    def _compute(self, work: "_Work[P]") -> None:
        with self._bisecting(work.number, work.batch):
            computed = self._function.compute(work.content)
            self._computed.put(_Work(work.number, work.batch, computed))

    def _finish(self, work: "_Work[C]") -> None:
        with self._bisecting(work.number, work.batch):
            answers = self._function.finish(work.content)
            requests = work.batch.requests
            if len(answers) != len(requests):
                raise ValueError(f"{len(answers)} answers: need {len(requests)}, one a request")
            for request, answer in zip(requests, answers, strict=True):
                self._answer(request, answer, is_alone=len(requests) == 1)
            self._budget.grow()
            self._watch.end(work.number)

    def _answer(self, request: Request, answer: bytes | Exception, is_alone: bool) -> None:
        if isinstance(answer, bytes):
            self._delivery.answer(request, answer)
        elif is_alone:
            self._delivery.failure(request, reason_of(answer))
        else:
            # A neighbour may have spoiled it, as a model's layers may mix a batch.
            self._requests.put_batch(Batch([request]))

    @contextmanager
    def _bisecting(self, number: int, batch: Batch) -> Iterator[None]:
        """Try the batch again in halves if a step fails, or answer a single request by the error.

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
        self._try_again(batch, reason, out_of_memory)
        self._watch.end(number)

    def _try_again(self, batch: Batch, reason: str, out_of_memory: bool) -> None:
        is_alone = len(batch.requests) == 1
        if out_of_memory or not is_alone:
            self._delivery.fault(batch, reason, out_of_memory)
        if is_alone:
            self._try_alone(batch, reason, out_of_memory)
        elif out_of_memory:
            self._budget.shrink(batch.num_padded_frames)
            self._requests.put_back(batch)
        else:
            middle = len(batch.requests) // 2
            for half in (batch.requests[:middle], batch.requests[middle:]):
                self._requests.put_batch(Batch(half))

    def _try_alone(self, batch: Batch, reason: str, out_of_memory: bool) -> None:
        (request,) = batch.requests
        key = request.client, request.number
        if out_of_memory and key not in self._tried_again:
            self._tried_again.add(key)
            time.sleep(_SECOND_TRY_AFTER_S)
            self._requests.put_batch(batch)
        else:
            self._delivery.failure(request, reason)


@dataclass(frozen=True, slots=True, eq=False)
class _Work(Generic[R]):
    """_Work: a batch between two steps."""

    number: int
    batch: Batch
    content: R


def reason_of(error: BaseException) -> str:
    """Return an error's kind and text."""
    return f"{type(error).__name__}: {error}"
