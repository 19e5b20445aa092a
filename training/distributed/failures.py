"""Find the ranks of one start and, after a failed exchange, those at fault.

torchrun's store survives its restarts. gloo keeps its addresses there under names that repeat, so
restarted ranks found those of dead ones and failed, or waited for ever (torch 2.13). Therefore each
start needs a key prefix of its own, on which its ranks agree in the rendezvous.

After a failed exchange each live rank answers in the store. A thread watches the exchanges for
which no host waits, such as NCCL's between GPUs, and ends a process that one of them holds up.
"""

import json
import math
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from uuid import uuid4

from torch._C._distributed_c10d import Store, Work

_POLL_INTERVAL_S = 0.05


@dataclass(frozen=True, slots=True)
class Member:
    """Member is one rank's process, with the type of the device that it trains on.

    `start` distinguishes it from earlier processes of that rank.
    """

    host: str = field(default_factory=socket.gethostname)
    process_id: int = field(default_factory=os.getpid)
    start: str = field(default_factory=lambda: uuid4().hex)
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Members:
    """Members lists one start's processes in rank order, and the prefix of their own keys."""

    prefix: str
    processes: tuple[Member, ...]

    def name(self, rank: int) -> str:
        """Name a rank by its host and process."""
        process = self.processes[rank]
        return f"rank {rank} (host {process.host}, process {process.process_id})"

    def first_difference(self) -> str:
        """Name two ranks that train on devices of two types; return nothing if there are none."""
        types = [process.device for process in self.processes]
        other = next((rank for rank, each in enumerate(types) if each != types[0]), None)
        if other is None:
            return ""
        return f"{self.name(0)} on {types[0]}, {self.name(other)} on {types[other]}"


def rendezvous(
    store: Store, rank: int, world_size: int, time_limit_s: float, device: str = "cpu"
) -> Members:
    """Wait for all ranks of this start; every rank returns the same members.

    Rank 0 chooses the prefix and lists the members once every rank has registered under it. A rank
    that reads the prefix of an earlier start registers there too, but is not in that start's list.
    Raises TimeoutError, which names the ranks that did not come.
    """
    own = Member(device=device)
    if rank == 0:
        store.set("start", own.start)
    deadline = time.monotonic() + time_limit_s
    prefix = ""
    while time.monotonic() < deadline:
        # Register under the latest start's prefix, again whenever a later start appears.
        if store.check(["start"]) and (latest := store.get("start").decode()) != prefix:
            store.set(f"{latest}/member/{rank}", json.dumps(asdict(own)))
            prefix = latest
        # Rank 0 closes the list once all ranks have registered.
        if rank == 0 and store.check(_member_keys(prefix, world_size)):
            registered = [store.get(key).decode() for key in _member_keys(prefix, world_size)]
            store.set(f"{prefix}/members", json.dumps(registered))
        # A closed list without this process is that of an earlier start.
        if prefix and store.check([f"{prefix}/members"]):
            listed = json.loads(store.get(f"{prefix}/members"))
            processes = tuple(Member(**json.loads(member)) for member in listed)
            if rank < len(processes) and processes[rank] == own:
                return Members(prefix, processes)
        time.sleep(_POLL_INTERVAL_S)
    keys = _member_keys(prefix, world_size)
    absent = [other for other, key in enumerate(keys) if not store.check([key])]
    # Without rank 0 there is no prefix, or that of an earlier start, whose ranks all registered.
    raise TimeoutError(
        f"ranks {absent if prefix and absent else [0]} of {world_size} did not come within "
        f"{time_limit_s:g} s: see their logs; if they are only slow to start, raise the time limit"
    )


def _member_keys(prefix: str, world_size: int) -> list[str]:
    return [f"{prefix}/member/{rank}" for rank in range(world_size)]


@dataclass(frozen=True, slots=True)
class Pending:
    """Pending is an exchange that was not complete when last polled."""

    exchange: str
    since: float
    work: Work


class DeviceExchanges:
    """DeviceExchanges holds the pending exchanges, oldest first; threads share it."""

    def __init__(self) -> None:
        self._pending: deque[Pending] = deque()
        self._lock = threading.Lock()

    def add(self, exchange: str, work: Work) -> None:
        """Watch one more."""
        with self._lock:
            self._drop_completed()
            self._pending.append(Pending(exchange, time.monotonic(), work))

    def oldest(self) -> Pending | None:
        """Return the oldest pending exchange, if any."""
        with self._lock:
            self._drop_completed()
            return self._pending[0] if self._pending else None

    def _drop_completed(self) -> None:
        while self._pending and _is_over(self._pending[0].work):
            self._pending.popleft()


def _is_over(work: Work) -> bool:
    try:
        return bool(work.is_completed())
    except RuntimeError:
        # The device has failed: each later call of this process raises so, its host's too.
        return True


def end_process(message: str) -> None:
    """End this process with status 1 and one line on standard error, and without any cleanup.

    Its host may wait within CUDA for a device that waits for a dead rank: nothing can be raised.
    """
    print(message, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


@contextmanager
def ending_process_after(limit_s: float, message: str) -> Iterator[None]:
    """End this process with `message`, as `end_process` does, if the body takes longer."""
    timer = threading.Timer(limit_s, end_process, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True, slots=True)
class RankStatus:
    """RankStatus is a rank's answer to a poll: its exchange ("" between two) and for how long.

    `beside` names what its communication threads are in.
    """

    exchange: str
    duration_s: float
    has_left: bool = False
    beside: str = ""


def diagnose(members: Members, statuses: Mapping[int, RankStatus], waited_s: float) -> str:
    """Name the ranks that made an exchange fail after `waited_s` seconds of waiting."""
    ranks = range(len(members.processes))
    if silent := [rank for rank in ranks if rank not in statuses]:
        return f"{_names(members, silent)} did not answer: killed, stopped or stuck"
    if left := [rank for rank in ranks if statuses[rank].has_left]:
        return f"{_names(members, left)} had ended: took fewer steps than the others"
    # A rank is late only if it worked alone for as long as the others waited, less 10 %: ranks do
    # not leave the previous exchange at the same moment.
    at_work = [rank for rank in ranks if not statuses[rank].exchange and waited_s >= 1]
    if late := [rank for rank in at_work if statuses[rank].duration_s >= 0.9 * waited_s]:
        return (
            f"{_names(members, late)} came to no exchange for {waited_s:.0f} s: stuck in its own "
            "work, or slow"
        )
    places = ", ".join(f"rank {rank} {_place(statuses[rank])}" for rank in ranks)
    return f"all ranks answered: {places}"


def _names(members: Members, ranks: Sequence[int]) -> str:
    return ", ".join(map(members.name, ranks))


def _place(status: RankStatus) -> str:
    where = f"in {status.exchange}" if status.exchange else "at work alone"
    beside = f", beside {status.beside}" if status.beside else ""
    return f"{where} for {status.duration_s:.0f} s{beside}"


ANSWER_LIMIT_S = 5.0
SILENCE_LIMIT_S = 60.0
"""A rank whose thread does not beat for so long is polled, where a device waits for an exchange."""

GRACE_S = 2.0
"""A process that an exchange holds up has so long to end for a reason of its own."""

_IDLE_INTERVAL_S = 1.0


class FailureDetector:
    """FailureDetector is a thread that polls the other ranks and answers their polls.

    Only the thread uses `store`, a client of its own, so a store that hangs cannot hang training.
    A poll begins when an exchange has failed; the first diagnosis holds for every rank. Exchanges
    of a device raise nothing on the host: the thread watches them, and ends a process that one of
    them holds up for `time_limit_s`, or that waits for a rank that has ended or is silent.
    """

    def __init__(
        self,
        store: Store,
        members: Members,
        rank: int,
        time_limit_s: float,
        *,
        watches_devices: bool,
    ) -> None:
        self._store = store
        self._members = members
        self._rank = rank
        self._time_limit_s = time_limit_s
        self._device_exchanges = DeviceExchanges()
        self._num_beats = 0
        self._watches_devices = watches_devices
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._training_thread = threading.get_ident()
        self._exchanges: dict[int, tuple[str, float]] = {}
        self._alone_since = time.monotonic()
        self._diagnosis: str | None = None
        self._waited_s: float | None = None
        self._polled_at: float | None = None
        self._has_diagnosis = threading.Event()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="failure detector", daemon=True)
        self._thread.start()

    @contextmanager
    def in_exchange(self, exchange: str) -> Iterator[None]:
        """Answer polls with this exchange of the calling thread while the context lasts."""
        thread = threading.get_ident()
        self._exchanges[thread] = exchange, time.monotonic()
        try:
            yield
        finally:
            self._exchanges.pop(thread, None)
            if thread == self._training_thread:
                self._alone_since = time.monotonic()

    def watch(self, exchange: str, work: Work) -> None:
        """Watch an exchange that a device waits for, and its host does not."""
        self._device_exchanges.add(exchange, work)

    def diagnose(self) -> str:
        """Return why this rank's exchange failed, after 10 s at most."""
        _, since = self._exchanges.get(threading.get_ident(), ("", self._alone_since))
        self._waited_s = time.monotonic() - since
        self._wake.set()
        # A store that hangs delays the end of a failed training by 10 s, no more.
        if not self._has_diagnosis.wait(2 * ANSWER_LIMIT_S):
            return "the rendezvous store does not answer"
        assert self._diagnosis is not None
        return self._diagnosis

    def report_end(self, reason: str) -> None:
        """Report why this rank ends: the others' next exchange with it fails for this reason."""
        self._conclude(f"{self._members.name(self._rank)} ended: {reason}")
        self.close()

    def close(self) -> None:
        """Answer later polls that this rank has left."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(ANSWER_LIMIT_S)

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                if self._watches_devices:
                    self._beat()
                    self._look_at_device()
                self._advance()
                is_polling = self._polled_at is not None and self._diagnosis is None
                self._wake.wait(_POLL_INTERVAL_S if is_polling else _IDLE_INTERVAL_S)
                self._wake.clear()
            # This rank leaves: pass its reason on, if any, and answer later polls in advance.
            if self._diagnosis is not None:
                self._store.compare_set(self._key("diagnosis"), "", self._diagnosis)
            self._write_status(has_left=True)
            self._store.set(self._key(f"done/{self._rank}"), "")
            if self._rank == 0 and self._diagnosis is not None:
                self._wait_for_readers()
        except RuntimeError as error:
            self._conclude(
                "the rendezvous store is gone: torchrun, or else "
                f"{self._members.name(0)}, which held it, has ended ({error})"
            )
            while not self._is_closing:
                self._end_if_held_up()
                self._wake.wait(_IDLE_INTERVAL_S)

    def _advance(self) -> None:
        """Take the poll one step further, without waiting for another rank."""
        if self._diagnosis is not None:
            return
        # A stored diagnosis ends a poll; a running one collects statuses. Otherwise start a poll if
        # an exchange of this rank has failed, or answer the poll that another rank has started.
        if self._store.check([self._key("diagnosis")]):
            self._conclude(self._store.get(self._key("diagnosis")).decode())
            self._store.set(self._key(f"done/{self._rank}"), "")
        elif self._polled_at is not None:
            self._collect_statuses()
        elif self._waited_s is not None or self._store.check([self._key("poll")]):
            self._store.set(self._key("poll"), "")
            self._polled_at = time.monotonic()
            self._write_status()

    def _beat(self) -> None:
        """Record in the store that this process is alive; the value differs each time."""
        self._num_beats += 1
        self._store.set(self._key(f"beat/{self._rank}"), str(self._num_beats))

    def _look_at_device(self) -> None:
        """Begin a poll where a device waits too long; end this process once it is diagnosed."""
        self._end_if_held_up()
        pending = self._device_exchanges.oldest()
        if pending is None or (waited_s := time.monotonic() - pending.since) < GRACE_S:
            self._beats.clear()
        elif self._waited_s is None and waited_s > self._time_limit_s:
            self._waited_s = waited_s
        elif self._waited_s is None and self._silence_s() > SILENCE_LIMIT_S:
            # No rank is late yet; the poll finds those that do not answer or have left.
            self._waited_s = math.inf

    def _silence_s(self) -> float:
        """Return how long the most silent rank has sent no beat since a device began to wait."""
        keys = [self._key(f"beat/{rank}") for rank in range(len(self._members.processes))]
        now = time.monotonic()
        if not self._store.check(keys):  # one ended within a second: the time limit counts
            return 0.0
        for rank, beat in enumerate(self._store.multi_get(keys)):
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now
        return now - min(since for _, since in self._beats.values())

    def _end_if_held_up(self) -> None:
        """End this process where a rank has failed, and the device waits for it."""
        pending = self._device_exchanges.oldest()
        if self._diagnosis is None or pending is None:
            return
        if time.monotonic() - pending.since > GRACE_S:
            size = len(self._members.processes)
            message = failure_message(pending.exchange, self._rank, size, self._diagnosis)
            end_process(message)

    def _collect_statuses(self) -> None:
        """Diagnose, if this rank's exchange failed and all have answered or the time is over."""
        assert self._polled_at is not None
        keys = [self._key(f"status/{rank}") for rank in range(len(self._members.processes))]
        is_over = time.monotonic() - self._polled_at > ANSWER_LIMIT_S
        if self._waited_s is None or not (is_over or self._store.check(keys)):
            return
        statuses = {
            rank: RankStatus(**json.loads(self._store.get(key)))
            for rank, key in enumerate(keys)
            if self._store.check([key])
        }
        own = diagnose(self._members, statuses, self._waited_s)
        # Ranks may diagnose at the same time: the first one's text is stored and returned.
        self._conclude(self._store.compare_set(self._key("diagnosis"), "", own).decode())

    def _wait_for_readers(self) -> None:
        """Keep this process alive for the other ranks: without torchrun it holds the store."""
        deadline = time.monotonic() + ANSWER_LIMIT_S / 2
        ranks = range(len(self._members.processes))
        answered = [rank for rank in ranks if self._store.check([self._key(f"status/{rank}")])]
        done = [self._key(f"done/{rank}") for rank in answered]
        while not self._store.check(done) and time.monotonic() < deadline:
            time.sleep(_POLL_INTERVAL_S)

    def _write_status(self, *, has_left: bool = False) -> None:
        # A thread beside waits for other ranks all the time: it says nothing of the training.
        exchanges = dict(self._exchanges)
        exchange, since = exchanges.pop(self._training_thread, ("", self._alone_since))
        # The host may have begun other work while its device still waits.
        if (pending := self._device_exchanges.oldest()) is not None:
            exchange, since = pending.exchange, pending.since
        beside = ", ".join(other for other, _ in exchanges.values())
        status = RankStatus(exchange, time.monotonic() - since, has_left, beside)
        self._store.set(self._key(f"status/{self._rank}"), json.dumps(asdict(status)))

    def _conclude(self, diagnosis: str) -> None:
        self._diagnosis = self._diagnosis or diagnosis
        self._has_diagnosis.set()

    def _key(self, name: str) -> str:
        return f"{self._members.prefix}/{name}"


def failure_message(exchange: str, rank: int, num_ranks: int, cause: str) -> str:
    """Say which exchange failed, on which rank, for what cause, and what to check."""
    return (
        f"{exchange} failed on rank {rank} of {num_ranks}: {cause}. Check that "
        "every rank is alive (the first error in the ranks' logs is the cause), that all "
        "take the same number of steps, and that their hosts reach each other "
        "(GLOO_SOCKET_IFNAME, firewall); a rank that is only slow needs a group with a "
        "longer time limit"
    )
