"""Who is gone, when an exchange has failed: every rank that lives answers a call in the store."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict

from training.distributed.fault_diagnosis import Answer, find_fault
from training.distributed.rendezvous import Members, Store

ANSWER_LIMIT_S = 5.0
_ROUND_S = 1.0
_CALLED_ROUND_S = 0.05


class FailureDetector:
    """A thread that answers for this rank, and calls the others when an exchange has failed.

    All traffic with `store` is the thread's, so that one that hangs cannot hang training; `store`
    must be a client of its own. A world fails once: the first verdict is every rank's.
    """

    def __init__(self, store: Store, members: Members, rank: int) -> None:
        self._store = store
        self._members = members
        self._rank = rank
        self._place = ("", time.monotonic())
        self._verdict: str | None = None
        self._waited_s: float | None = None
        self._called_at: float | None = None
        self._is_concluded = threading.Event()
        self._wake = threading.Event()
        self._is_closing = False
        self._thread = threading.Thread(target=self._serve, name="failure detector", daemon=True)
        self._thread.start()

    @contextmanager
    def within(self, exchange: str) -> Iterator[None]:
        """Answer, while this lasts, that the rank is in this exchange."""
        self._place = (exchange, time.monotonic())
        try:
            yield
        finally:
            self._place = ("", time.monotonic())

    def find_fault(self) -> str:
        """Say why the exchange that this rank is in has failed; takes 10 s at the longest."""
        self._waited_s = time.monotonic() - self._place[1]
        self._wake.set()
        if not self._is_concluded.wait(2 * ANSWER_LIMIT_S):
            return "the store in which the ranks met does not answer"
        assert self._verdict is not None
        return self._verdict

    def end(self, reason: str) -> None:
        """Tell the others why this rank ends: their next exchange with it fails."""
        self._conclude(f"{self._members.name(self._rank)} ended: {reason}")
        self.close()

    def close(self) -> None:
        """Answer from now on that this rank has left."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(ANSWER_LIMIT_S)

    def _serve(self) -> None:
        try:
            while not self._is_closing:
                self._take_round()
                self._wake.wait(_ROUND_S if self._called_at is None else _CALLED_ROUND_S)
                self._wake.clear()
            if self._verdict is not None:
                self._store.compare_set(self._key("verdict"), "", self._verdict)
            self._answer(has_left=True)
            self._store.set(self._key(f"done/{self._rank}"), "")
            if self._rank == 0 and self._verdict is not None:
                self._let_others_read()
        except RuntimeError as error:
            self._conclude(
                "the store in which the ranks met is gone: torchrun, or else "
                f"{self._members.name(0)}, which held it, has ended ({error})"
            )

    def _take_round(self) -> None:
        """Do what is due without waiting for anybody."""
        if self._verdict is not None:
            return
        if self._store.check([self._key("verdict")]):
            self._conclude(self._store.get(self._key("verdict")).decode())
            self._store.set(self._key(f"done/{self._rank}"), "")
        elif self._called_at is not None:
            self._count()
        elif self._waited_s is not None or self._store.check([self._key("call")]):
            self._store.set(self._key("call"), "")
            self._called_at = time.monotonic()
            self._answer()

    def _count(self) -> None:
        """Conclude where this rank has called, and all have answered or had their time."""
        assert self._called_at is not None
        answers = [self._key(f"answer/{rank}") for rank in range(len(self._members.processes))]
        late = time.monotonic() - self._called_at > ANSWER_LIMIT_S
        if self._waited_s is None or not (late or self._store.check(answers)):
            return
        found = {
            rank: Answer(**json.loads(self._store.get(key)))
            for rank, key in enumerate(answers)
            if self._store.check([key])
        }
        verdict = find_fault(self._members, found, self._waited_s)
        self._conclude(self._store.compare_set(self._key("verdict"), "", verdict).decode())

    def _let_others_read(self) -> None:
        """Stay a while: without torchrun this rank's process is the store."""
        deadline = time.monotonic() + ANSWER_LIMIT_S / 2
        ranks = range(len(self._members.processes))
        answered = [rank for rank in ranks if self._store.check([self._key(f"answer/{rank}")])]
        done = [self._key(f"done/{rank}") for rank in answered]
        while not self._store.check(done) and time.monotonic() < deadline:
            time.sleep(_CALLED_ROUND_S)

    def _answer(self, *, has_left: bool = False) -> None:
        exchange, since = self._place
        answer = Answer(exchange, time.monotonic() - since, has_left)
        self._store.set(self._key(f"answer/{self._rank}"), json.dumps(asdict(answer)))

    def _conclude(self, verdict: str) -> None:
        self._verdict = self._verdict or verdict
        self._is_concluded.set()

    def _key(self, name: str) -> str:
        return f"{self._members.prefix}/{name}"
