"""Share what tests behind the faulty proxy need: impatient clients, and counts that must agree."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from infra.store import retry, s3
from infra.task_metrics import RequestCounts
from tests.faults.failing_store.faulty_proxy import KINDS, REFUSALS, FaultyProxy, faulty_proxy

ALL_KINDS = sorted({kind for kinds in KINDS.values() for kind in kinds})

StartProxy = Callable[..., FaultyProxy]


class Server(NamedTuple):
    """Server holds an S3 server's endpoint, and the URI of a fresh bucket there."""

    endpoint: str
    uri: str


@pytest.fixture(params=["s3", pytest.param("ceph", marks=pytest.mark.cluster)])
def server(request: pytest.FixtureRequest) -> Server:
    """Serve from moto, and from Ceph."""
    endpoint = request.getfixturevalue(f"{request.param}_endpoint")
    return Server(endpoint, f"s3://{request.getfixturevalue(f'{request.param}_bucket')}")


@pytest.fixture
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the waits between attempts, not those for answers, which a busy machine delays."""
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.002)


@pytest.fixture
def impatient(quick_retries: None, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ARG001
    """Shorten the waits for answers too, for tests whose server stalls."""
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 4.0)


@pytest.fixture
def start_proxy(
    quick_retries: None,  # noqa: ARG001
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[StartProxy]:
    """Return a function that puts a proxy before a server and points the environment to it."""
    with ExitStack() as running:

        def start(upstream: str, rate: float, *kinds: str, **settings: int) -> FaultyProxy:
            weights = {kind: float(kind in kinds) for kind in ALL_KINDS} if kinds else {"stall": 0}
            proxy = running.enter_context(faulty_proxy(upstream, rate, weights=weights, **settings))
            monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
            return proxy

        yield start


def require_counts_agree(made: RequestCounts, proxy: FaultyProxy) -> None:
    """Require that we counted what the proxy saw, and one retry for each fault.

    Two corrupt answers to a listing cost one retry. Corruption of bytes that we do not read costs
    none, nor does a refusal, which is an answer.
    """
    seen = proxy.requests
    assert (made.get, made.put, made.head, made.list) == tuple(
        seen[operation] for operation in ("GET", "PUT", "HEAD", "LIST")
    )
    unnoticed = proxy.injected["LIST", "corrupt_body"]
    num_failures = sum(n for (_, kind), n in proxy.injected.items() if kind not in REFUSALS)
    assert num_failures - unnoticed <= made.retries <= num_failures
