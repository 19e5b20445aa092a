"""A task's stream of requests to its host's device servers, answered in order."""

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack

from infra.device_faults import FAULTS
from infra.devices.batches import Batch, PoolRequest, form_batches
from infra.devices.device_pool import DeviceError, DevicePool
from infra.devices.in_flight_requests import InFlightRequests, PoolAnswer
from infra.devices.messages import MAX_MESSAGE_BYTES
from infra.devices.server_link import ServerLink
from infra.spark.task_resources import task_devices

LOOK_AHEAD_BATCHES = 6
"""The frames among which like lengths are found, in batches. Another number makes other batches."""

_IN_FLIGHT_BATCHES = 6
_OPEN_AFTER_S = 0.2  # in which batches have waited that no server asks for
_POLL_INTERVAL_S = 0.1
_SHARE_BATCHES = 3  # one for each thread of a server; what is beyond waits for another device
_CLOSE_LIMIT_S = 5.0


class RequestStream:
    """RequestStream forms a task's batches, and keeps them in flight to its host's devices.

    The requests alone decide which of them are a batch: neither the devices nor other tasks do. A
    request has at most `longest_frames`, or fits into a batch. Devices are opened one by one, the
    least busy first, while batches wait that no server asks for. A device that cannot be used is
    left out, and `left_out` says why.
    """

    def __init__(self, pool: DevicePool, longest_frames: int = 0) -> None:
        self._pool = pool
        self._devices = task_devices(pool.devices)
        longest = max(pool.batch_frames, longest_frames)
        self._look_ahead_frames = LOOK_AHEAD_BATCHES * longest
        self._in_flight_frames = _IN_FLIGHT_BATCHES * longest
        self._in_flight = InFlightRequests(_SHARE_BATCHES)
        self._links: dict[str, ServerLink] = {}
        self._left_out: dict[str, str] = {}
        self._waiting_since_s = 0.0
        self._num_read = 0
        self._open = ExitStack()

    @property
    def left_out(self) -> Mapping[str, str]:
        """Return why devices were left out, by their names."""
        return dict(self._left_out)

    def answers(self, requests: Iterable[PoolRequest]) -> Iterator[PoolAnswer]:
        """Yield each request's answer, in order; DeviceError if no device can be used.

        `requests` are taken as far ahead as batches look, beyond those in flight.
        """
        numbered = self._numbered(requests)
        num_taken = 0
        with self._pool.in_use(), self._open:
            for batch in form_batches(numbered, self._pool.batch_frames, self._look_ahead_frames):
                # The next answer may be one of this batch, whose first request is the oldest.
                while self._is_full(batch) and num_taken < batch.numbers[0]:
                    yield self._next(num_taken)
                    num_taken += 1
                self._give(batch)
                while (answer := self._in_flight.take(num_taken)) is not None:
                    yield answer
                    num_taken += 1
            for number in range(num_taken, self._num_read):
                yield self._next(number)

    def _numbered(self, requests: Iterable[PoolRequest]) -> Iterator[tuple[int, PoolRequest]]:
        for number, request in enumerate(requests):
            self._num_read = number + 1
            num_bytes = len(request.payload)
            if num_bytes > MAX_MESSAGE_BYTES:
                need = f"need at most {MAX_MESSAGE_BYTES}"
                self._in_flight.refuse(number, f"request of {num_bytes} bytes: {need}")
            else:
                yield number, request

    def _is_full(self, batch: Batch) -> bool:
        held = self._in_flight.num_frames
        return held > 0 and held + batch.num_frames > self._in_flight_frames

    def _give(self, batch: Batch) -> None:
        self._in_flight.add(batch)
        self._offer()
        self._open_device()

    def _offer(self) -> None:
        for link in list(self._links.values()):
            link.offer()

    def _next(self, number: int) -> PoolAnswer:
        while (answer := self._in_flight.take(number, _POLL_INTERVAL_S)) is None:
            self._open_device()
        return answer

    def _open_device(self) -> None:
        """Open one more device if batches wait that those open do not ask for."""
        usable = [
            each for each in self._devices if each not in self._links and each not in self._left_out
        ]
        if not usable and len(self._left_out) == len(self._devices):
            raise DeviceError(self._no_device())
        if not usable or not self._need_another():
            return
        self._waiting_since_s = time.monotonic()
        device = self._open.enter_context(self._pool.least_busy(usable))
        link = ServerLink(self._pool, device, self._in_flight, self._offer)
        self._links[device] = link
        self._open.callback(self._close, link, thread := self._thread(link))
        thread.start()

    def _need_another(self) -> bool:
        num_frames = self._in_flight.num_waiting_frames
        if not self._links or not self._in_flight.num_waiting:
            self._waiting_since_s = time.monotonic()
            return self._in_flight.num_waiting > 0
        times_s = [link.connected_at_s for link in self._links.values()]
        connected_s = [each for each in times_s if each is not None]
        # Of servers that are about to start, each will take a batch.
        expected = len(times_s) - len(connected_s)
        since_s = max([self._waiting_since_s, *connected_s])
        has_waited = time.monotonic() > since_s + _OPEN_AFTER_S
        return has_waited and num_frames >= expected * self._pool.batch_frames

    def _thread(self, link: ServerLink) -> threading.Thread:
        def run() -> None:
            try:
                reason = link.run()
            except Exception as error:
                # Without a thread its requests would be waited for without end.
                reason = f"{type(error).__name__}: {error}"
            if reason:
                self._in_flight.lose(link.device, reason)
                self._left_out[link.device] = reason
                FAULTS.add(link.device, "left out", reason)
                del self._links[link.device]
                print(f"{link.device} is left out: {reason}", file=sys.stderr, flush=True)
                self._offer()

        return threading.Thread(target=run, name=f"device {link.device}", daemon=True)

    @staticmethod
    def _close(link: ServerLink, thread: threading.Thread) -> None:
        link.close()
        thread.join(_CLOSE_LIMIT_S)

    def _no_device(self) -> str:
        reasons = "; ".join(f"{device}: {reason}" for device, reason in self._left_out.items())
        return f"{self._pool.factory}: no device of this host can be used: {reasons}"
