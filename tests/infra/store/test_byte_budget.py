"""Objects in flight are bounded by their bytes together, and each by its own limit."""

import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest

from infra.store import object_store
from infra.store.object_store import (
    ByteBudget,
    Fetched,
    NoRoomError,
    ObjectRead,
    ObjectStore,
    ObjectTooLarge,
    Reservation,
    SizeBound,
    join_uri,
)
from tests.faults.failing_store.scripted_server import Request, Serve

pytestmark = pytest.mark.chaos

MB = 2**20
BUDGET = 32 * MB
OBJECT = 8 * MB


def test_a_budget_admits_what_fits_or_is_alone() -> None:
    """Bytes beyond the total are admitted only where no other object holds any."""
    budget = ByteBudget(100)
    first, second = (Reservation(budget, ObjectRead(uri, SizeBound(60, 500), id)) for uri in "ab")
    assert first.enter()
    assert not second.enter()
    with pytest.raises(NoRoomError, match="b: no room for 41 bytes"):
        second.admit(41)
    second.admit(40)
    first.admit(60)  # as expected: nothing more is needed
    with pytest.raises(NoRoomError):
        first.admit(61)
    second.leave()
    first.admit(500)
    with pytest.raises(ObjectTooLarge, match="a: 501 bytes: need at most 500"):
        first.admit(501)
    assert not second.enter()
    first.leave()
    assert second.enter()


@pytest.fixture
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "IN_FLIGHT_BYTES", BUDGET)


@pytest.fixture
def measured() -> Iterator[Callable[[], int]]:
    """Return a function that returns the most bytes that Python's objects held so far."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()


@pytest.mark.usefixtures("small_budget")
@pytest.mark.parametrize("bound", [SizeBound(), SizeBound(OBJECT), SizeBound(OBJECT // 4)])
def test_memory_is_bounded_whatever_is_expected(
    base: str, bound: SizeBound, measured: Callable[[], int]
) -> None:
    """160 MB come in order within 32 MB, whether their sizes were expected, or too small."""
    store = ObjectStore((base,))
    uris = [join_uri(base, str(number)) for number in range(20)]
    for number, uri in enumerate(uris):
        store.put(uri, bytes([number]) * OBJECT)
    tracemalloc.reset_peak()
    for number, (uri, found) in enumerate(store.get_many(uris, 16, [bound] * 20)):
        assert isinstance(found, Fetched)
        assert (uri, found.data[0], len(found.data)) == (uris[number], number, OBJECT)
        time.sleep(0.01)  # so that all the others come first
    # One more at its turn, one with the reader, buffers that grow by an eighth, 16 chunks of 1 MB.
    assert measured() < BUDGET + 4 * OBJECT < 20 / 2 * OBJECT


@pytest.mark.usefixtures("small_budget")
def test_larger_objects_are_fetched_alone(base: str) -> None:
    """An object above the budget, but within its own limit, comes in its turn."""
    store = ObjectStore((base,))
    sizes = [1, BUDGET + 1, 2, BUDGET + 2, BUDGET + 3]
    uris = [join_uri(base, str(size)) for size in sizes]
    for uri, size in zip(uris, sizes, strict=True):
        store.put(uri, bytes(size))
    for bound in (SizeBound(), SizeBound(10), SizeBound(BUDGET + 3), SizeBound(10, 5)):
        found = [each for _, each in store.get_many(uris, 4, [bound] * 5)]
        limit = bound.max_bytes or BUDGET * 2
        assert [type(each) for each in found] == [
            Fetched if size <= limit else ObjectTooLarge for size in sizes
        ]


def test_one_long_object_does_not_slow_the_others(serve: Serve) -> None:
    """An hour among utterances of 5 s: 63 of the others are in flight with it."""
    together, most = threading.Condition(), 0
    running = 0

    def script(request: Request) -> None:
        nonlocal running, most
        with together:
            running += 1
            most = max(most, running)
            together.notify_all()
            together.wait_for(lambda: most == 64, 10)
            running -= 1
        request.answer(b"audio")

    bounds = [SizeBound(160_000)] * 80
    bounds[40] = SizeBound(115_200_000)
    serve(script)
    store = ObjectStore(("s3://bucket",))
    uris = [f"s3://bucket/{number}" for number in range(80)]
    assert len(list(store.get_many(uris, 64, bounds))) == 80
    assert most == 64


def test_refused_objects_are_not_read(serve: Serve) -> None:
    """6 GB in S3 are refused by their Content-Length, before the first byte."""
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 6000000000\r\n\r\n"
    serve(lambda request: request.send(answer))
    store = ObjectStore(("s3://bucket",))
    bound = SizeBound(max_bytes=17_000_000)
    [(_, found)] = store.get_many(["s3://bucket/x"], 4, [bound])
    assert isinstance(found, ObjectTooLarge)
    assert str(found) == "s3://bucket/x: 6000000000 bytes: need at most 17000000"
