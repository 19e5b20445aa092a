"""Stores whose listings or conditional writes are not S3's are refused by name."""

import re
from collections.abc import Iterator

import pytest

from infra.store import retry
from infra.store.object_store import ObjectStore, StoreError
from infra.store.s3 import NAMES, NUM_RACES, s3_store
from infra.task_metrics import REQUESTS
from tests.infra.store.quirky_s3 import QuirkySettings, by_walk, quirky_s3
from tests.s3_server import CREDENTIALS

RUN, CHECKED = "s3://bucket/run", "s3://bucket/run/steps/store_check"
STORE = ObjectStore(("s3://bucket",))
DAYS = [
    *(f"c/day-late/{number}" for number in range(3)),
    *(f"c/day.{number}" for number in range(2)),
    *(f"c/day/part/{number}" for number in range(6)),
    "c/day0",
]


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[str, QuirkySettings]]:
    """Serve all tests of the module, which share a process's client too."""
    with quirky_s3() as server:
        yield server


@pytest.fixture
def server(running: tuple[str, QuirkySettings], monkeypatch: pytest.MonkeyPatch) -> QuirkySettings:
    """Return the settings of an empty store without quirks, which was not checked."""
    endpoint, settings = running
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.001)
    for name, value in {**CREDENTIALS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(s3_store(), "_is_checked", False)
    vars(settings).update(vars(QuirkySettings()))
    return settings


def test_a_store_that_behaves_is_checked_by_eleven_objects(server: QuirkySettings) -> None:
    """A later check, or another driver's, writes nothing and asks thrice."""
    STORE.check(CHECKED)
    keys = sorted(key.removeprefix("run/steps/store_check/") for key in server.objects)
    assert [key for key in keys if not re.fullmatch(r"race/[0-9a-f]{32}", key)] == list(NAMES)
    assert len(keys) == len(NAMES) + NUM_RACES
    before, objects = REQUESTS.total(), dict(server.objects)
    STORE.check(CHECKED)
    made = REQUESTS.total() - before
    assert (made.put, made.list, made.num_requests) == (1, 2, 3)
    assert server.objects == objects


def test_a_store_that_ignores_the_condition_is_refused(server: QuirkySettings) -> None:
    """At the first check, and at a later one of a run that began on another version."""
    server.ignores_condition = True
    for _ in range(2):
        with pytest.raises(StoreError, match=r"race/\w+: need conditional writes .*took 8 of 8"):
            STORE.check(CHECKED)
    server.ignores_condition = False
    STORE.check(CHECKED)
    server.ignores_condition = True
    with pytest.raises(StoreError, match=r"store_check/B: need conditional writes .*ignores them"):
        STORE.check(CHECKED)


def test_a_store_that_looks_before_it_writes_is_refused(server: QuirkySettings) -> None:
    """It refuses each write that comes later, and takes several that come at once."""
    server.decides_late = True
    assert STORE.put_if_absent(f"{RUN}/x", b"1")
    assert not STORE.put_if_absent(f"{RUN}/x", b"2")
    for _ in range(2):
        with pytest.raises(StoreError, match=r"not keep them apart: it took [2-8] of 8 writes"):
            STORE.check(CHECKED)


@pytest.mark.parametrize(
    "refusal", [(501, "NotImplemented"), (400, "InvalidArgument"), (405, "MethodNotAllowed")]
)
def test_a_store_that_refuses_the_condition_is_named(
    server: QuirkySettings, refusal: tuple[int, str]
) -> None:
    """It takes the same write without, so that neither the URI nor the endpoint is to blame."""
    server.refusal = refusal
    named = rf"need conditional writes .*If-None-Match.* answered {refusal[0]} {refusal[1]} .*Ceph"
    with pytest.raises(StoreError, match=named) as caught:
        STORE.check(CHECKED)
    assert "check the URI" not in str(caught.value)


@pytest.mark.parametrize(("order", "size"), [(by_walk, 1000), (by_walk, 1), (str.lower, 1000)])
def test_a_store_of_another_order_is_refused_before_a_run(
    server: QuirkySettings, order, size: int
) -> None:
    """It walks directories, in pages of any size, or knows no case."""
    server.order, server.page_size = order, size
    with pytest.raises(StoreError, match=r"store_check: a listing (out of order|by the store)"):
        STORE.check(CHECKED)


def test_a_store_that_does_not_list_what_was_written_is_refused(server: QuirkySettings) -> None:
    """The object is named."""
    server.hidden = "a-b"
    with pytest.raises(StoreError, match=r"lacks s3://.*store_check/a-b, which was written"):
        STORE.check(CHECKED)


PAGES = {
    "out of order within a page": lambda keys, _: (keys[::-1], True),
    "twice in a page": lambda keys, _: ([keys[0], keys[0]], True),
    "a page that begins at the last key": lambda keys, after: (
        [key for key in keys if key >= after][:2],
        False,
    ),
    "the first page again": lambda keys, _: (keys[:2], False),
    "an empty page, and more": lambda _keys, after: ([], after == "never"),
    "another folder": lambda keys, _: ([*keys, "d/elsewhere"], True),
}


@pytest.mark.parametrize("fault", PAGES)
def test_pages_that_are_no_listing_are_refused(server: QuirkySettings, fault: str) -> None:
    """At once, with the remedy: the answer is the same each time, and would go on without end."""
    server.objects = dict.fromkeys(DAYS, b"")
    server.page_of = PAGES[fault]
    before = REQUESTS.total()
    with pytest.raises(StoreError, match=r"s3://bucket/c: a listing .*objects could be lost"):
        STORE.list("s3://bucket/c")
    assert (REQUESTS.total() - before).retries == 0


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_a_walk_that_passes_over_siblings_is_noticed(server: QuirkySettings, size: int) -> None:
    """No page shows it: where one ends within day/, the store takes day-late/ for listed."""
    server.objects, server.order, server.page_size = dict.fromkeys(DAYS, b""), by_walk, size
    with pytest.raises(StoreError, match=r"a listing out of order"):
        STORE.list("s3://bucket/c")


@pytest.mark.parametrize("size", [1, 4, 12])
def test_siblings_are_listed_once_in_pages_of_any_size(server: QuirkySettings, size: int) -> None:
    """A store that lists by key is believed, whether it was checked or not."""
    server.objects, server.page_size = dict.fromkeys(DAYS, b""), size
    assert [found.uri for found in STORE.list("s3://bucket/c")] == [
        f"s3://bucket/{k}" for k in DAYS
    ]
    STORE.check(CHECKED)
    before = REQUESTS.total()
    assert len(STORE.list("s3://bucket/c")) == len(DAYS)
    assert (REQUESTS.total() - before).list == 2 * -(-len(DAYS) // size)


def test_a_directory_bucket_is_refused(server: QuirkySettings) -> None:  # noqa: ARG001
    """S3 Express One Zone lists in no order of keys."""
    with pytest.raises(StoreError, match=r"directory bucket, .*general-purpose"):
        ObjectStore(("s3://speech--use1-az4--x-s3",)).get("s3://speech--use1-az4--x-s3/c")
