"""Several processes read from a server that throttles: all is read, at the server's rate."""

import re
import subprocess
import sys
import threading
import time

import pytest

from infra.store import retry
from infra.store.object_store import ObjectStore, StoreError
from infra.task_metrics import REQUESTS
from tests.faults.failing_store.scripted_server import Request, Serve

SERVED_PER_S = 100.0
NUM_PROCESSES, NUM_EACH = 3, 200

READ = f"""
from infra.store.object_store import Fetched, ObjectStore
uris = [f"s3://bucket/corpus/audio/{{number}}" for number in range({NUM_EACH})]
found = [each for _, each in ObjectStore(("s3://bucket",)).get_many(uris, in_flight=32)]
assert all(isinstance(each, Fetched) and each.data == b"audio" for each in found), found
print(len(found))
"""


class ThrottlingServer:
    """ThrottlingServer serves `SERVED_PER_S` GETs a second, and answers 503 to the others."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.tokens, self.filled_s = 5.0, time.monotonic()
        self.served_s: list[float] = []
        self.num_throttled = 0

    def __call__(self, request: Request) -> None:
        if self.serves():
            request.answer(b"audio")
        else:
            request.answer(b"<Error><Code>SlowDown</Code></Error>", "503 Slow Down")

    def serves(self) -> bool:
        """Take a token if there is one."""
        with self.lock:
            now_s = time.monotonic()
            self.tokens = min(self.tokens + (now_s - self.filled_s) * SERVED_PER_S, 5.0)
            self.filled_s = now_s
            if self.tokens < 1.0:
                self.num_throttled += 1
                return False
            self.tokens -= 1.0
            self.served_s.append(now_s)
            return True


def test_throttled_processes_share_the_servers_rate(serve: Serve) -> None:
    """96 GETs in flight where 100 a second are served: no process fails, and no rate is lost."""
    server = ThrottlingServer()
    serve(server)
    command = [sys.executable, "-c", READ]
    readers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(NUM_PROCESSES)
    ]
    for reader in readers:
        assert reader.communicate(timeout=120)[0] == f"{NUM_EACH}\n"
    served_s = server.served_s
    assert len(served_s) == NUM_PROCESSES * NUM_EACH
    # Three of four objects: at the end fewer and fewer are asked for.
    three_quarters = len(served_s) * 3 // 4
    assert three_quarters / (served_s[three_quarters] - served_s[0]) > 0.75 * SERVED_PER_S
    # Backoff alone: 943 for these 600, at 79 a second.
    assert server.num_throttled < len(served_s)


def test_a_store_that_serves_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    """Patience with throttling is for a store that serves others; an outage ends in an error."""
    monkeypatch.setattr(retry, "LIMIT_S", 1.5)
    serve(lambda request: request.answer(status="503 Service Unavailable"))
    begin = time.monotonic()
    store = ObjectStore(("s3://bucket",))
    found = [each for _, each in store.get_many([f"s3://bucket/{n}" for n in range(20)], 20)]
    assert time.monotonic() - begin < 20
    assert all(isinstance(each, StoreError) for each in found)
    assert all(re.search("answered 503 .*attempts in|the store throttles", str(e)) for e in found)


def test_one_throttled_place_does_not_slow_another(
    monkeypatch: pytest.MonkeyPatch, serve: Serve
) -> None:
    """A run whose writes are throttled reads its corpus as fast as before."""

    def script(request: Request) -> None:
        is_write = request.method == "PUT"
        request.answer(status="503 Slow Down" if is_write else "200 OK")

    serve(script)
    monkeypatch.setattr(retry, "LIMIT_S", 0.7)
    store = ObjectStore(("s3://bucket",))
    with pytest.raises(StoreError, match="503"):
        store.put("s3://bucket/run/x/1", b"")
    before = REQUESTS.total()
    assert len(list(store.get_many([f"s3://bucket/run/x/{n}" for n in range(100)]))) == 100
    assert (REQUESTS.total() - before).retries == 0
