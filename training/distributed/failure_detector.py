"""Find the ranks at fault after a failed exchange: every live rank answers a poll in the store."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from training.distributed.fault_diagnosis import RankStatus, diagnose
from training.distributed.rendezvous import Members, Store

ANSWER_LIMIT_S = 5.0
_IDLE_INTERVAL_S = 1.0
_POLL_INTERVAL_S = 0.05


class FailureDetector:
    """FailureDetector is a thread that polls the other ranks and answers their polls.

    Only the thread uses `store`, a client of its own, so a store that hangs cannot hang training.
    A poll begins when an exchange has failed; the first diagnosis holds for every rank.
    """

    def __init__(self, store: Store, members: Members, rank: int) -> None:
        self._store = store
        self._members = members
        self._rank = rank
        self._exchange_since = ("", time.monotonic())
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
        """Answer polls with this exchange while the context lasts."""
        self._exchange_since = (exchange, time.monotonic())
        try:
            yield
        finally:
            self._exchange_since = ("", time.monotonic())

    def diagnose(self) -> str:
        """Return why this rank's exchange failed, after 10 s at most."""
        self._waited_s = time.monotonic() - self._exchange_since[1]
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
                self._advance()
                self._wake.wait(_IDLE_INTERVAL_S if self._polled_at is None else _POLL_INTERVAL_S)
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
        exchange, since = self._exchange_since
        status = RankStatus(exchange, time.monotonic() - since, has_left)
        self._store.set(self._key(f"status/{self._rank}"), json.dumps(asdict(status)))

    def _conclude(self, diagnosis: str) -> None:
        self._diagnosis = self._diagnosis or diagnosis
        self._has_diagnosis.set()

    def _key(self, name: str) -> str:
        return f"{self._members.prefix}/{name}"
