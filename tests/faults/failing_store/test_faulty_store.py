"""The store accepts no wrong byte behind a proxy that fails and corrupts requests."""

import hashlib
import time
from typing import BinaryIO

import pytest

from infra.store import s3
from infra.store.object_store import Fetched, ObjectNotFound, ObjectStore, StoreError, scan_checked
from infra.task_metrics import REQUESTS
from pipeline.records import Tally
from pipeline.runs.commit import Commit, step_context
from tests.faults.failing_store.faulty_proxy import REFUSALS
from tests.faults.failing_store.proxied import ALL_KINDS, Server, StartProxy, require_counts_agree


def content(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() * 100


@pytest.mark.parametrize("kind", sorted({*ALL_KINDS} - {*REFUSALS, "stall"}))
def test_each_fault_is_survived(server: Server, start_proxy: StartProxy, kind: str) -> None:
    """Three of ten requests fail, and objects are written, read, listed and described correctly."""
    proxy = start_proxy(server.endpoint, 0.3, kind, seed=1)
    base = f"{server.uri}/{kind}"
    store, before = ObjectStore((base,)), REQUESTS.total()
    uris = [f"{base}/{number:02}" for number in range(24)]
    for number, uri in enumerate(uris):
        write = store.put if number % 2 else store.put_if_absent
        write(uri, content(number))
    assert list(store.get_many(uris, in_flight=8)) == [
        (uri, Fetched(content(number), hashlib.md5(content(number)).hexdigest()))
        for number, uri in enumerate(uris)
    ]
    for _ in range(4):
        assert [(info.uri, info.num_bytes) for info in store.list(base)] == [
            (uri, len(content(0))) for uri in uris
        ]
    assert all(store.head(uri).num_bytes == len(content(0)) for uri in uris)
    assert not store.exists(f"{base}/none")
    assert proxy.num_faults > 5
    require_counts_agree(REQUESTS.total() - before, proxy)


def test_stalled_requests_are_given_up_and_repeated(
    server: Server, start_proxy: StartProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests without an answer cost one read timeout each, at the same time.

    The fourth was sent before the first was repeated: one after the other, they would wait in turn.
    """
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 4.0)
    proxy = start_proxy(server.endpoint, 0.0, "stall", limit=4)
    store = ObjectStore((server.uri,))
    uris = [f"{server.uri}/{number}" for number in range(4)]
    for number, uri in enumerate(uris):
        store.put(uri, content(number))
    before, begin, proxy.rate = REQUESTS.total(), time.monotonic(), 1.0
    proxy.paths.clear()
    found = [each.data for _, each in store.get_many(uris, in_flight=4)]  # type: ignore[union-attr]
    assert found == [content(number) for number in range(4)]
    assert time.monotonic() - begin >= 4.0
    assert len({path for _, path in proxy.paths[:4]}) == 4
    assert (REQUESTS.total() - before).retries == proxy.num_faults == 4


def test_lasting_corruption_is_an_error_with_both_digests(
    server: Server, start_proxy: StartProxy
) -> None:
    """When every body is corrupt the caller gets no bytes, but the URI, two MD5s and a remedy."""
    proxy = start_proxy(server.endpoint, 0.0, "corrupt_body", "corrupt_upload")
    store, uri = ObjectStore((server.uri,)), f"{server.uri}/x"
    store.put(uri, content(1))
    proxy.rate = 1.0
    right = hashlib.md5(content(1)).hexdigest()
    message = rf"{uri}: MD5 of the bytes is [0-9a-f]{{32}}, .* {right} at 127.*disk.*10 attempts"
    with pytest.raises(StoreError, match=message):
        store.get(uri)
    with pytest.raises(
        StoreError, match=rf"{uri}: (MD5 of the bytes is {right}|.* answered 400 X?\w+)"
    ):
        store.put(uri, content(1))


def test_the_lost_answer_of_our_own_commit_is_not_a_conflict(
    server: Server, start_proxy: StartProxy
) -> None:
    """The record was written, the answer lost and the retry refused (412): the commit is ours."""
    proxy = start_proxy(server.endpoint, 0.0, "reset_after", limit=1)
    store, run_uri = ObjectStore((server.uri,)), f"{server.uri}/run"
    context = step_context(store, run_uri, "features/x", {}, {})
    output = context.put_output("0", ".bin", b"one", Tally())
    record = Commit("0", context.fingerprint, (output,), None, Tally(), Tally())
    proxy.rate = 1.0
    assert context.commit(record).to_bytes() == record.to_bytes()
    assert proxy.injected == {("PUT", "reset_after"): 1}
    assert proxy.requests["PUT"] == 3


def digest_of(file: BinaryIO) -> str:
    """Read in three parts, out of order; raise ValueError if the parts are not the whole."""
    file.seek(-5, 2)
    tail = file.read()
    file.seek(0)
    data = file.read(9_000_000) + file.read()
    if not data.endswith(tail) or hashlib.md5(data).hexdigest() != LARGE_MD5:
        raise ValueError("the parts do not make the whole")
    return hashlib.md5(data).hexdigest()


LARGE = content(7) * 4000
LARGE_MD5 = hashlib.md5(LARGE).hexdigest()


@pytest.mark.parametrize("kind", ["internal_error", "reset_after", "short_body", "corrupt_body"])
def test_files_read_in_parts_survive_faults(
    server: Server, start_proxy: StartProxy, kind: str
) -> None:
    """The file retries ranges that fail; its reader detects corrupt ones and reads them again."""
    proxy = start_proxy(server.endpoint, 0.0, kind, limit=3)
    store, uri = ObjectStore((server.uri,)), f"{server.uri}/large"
    store.put(uri, LARGE)
    before, proxy.rate = REQUESTS.total(), 0.7
    for _ in range(2):
        assert scan_checked(store, uri, digest_of) == LARGE_MD5
    assert proxy.injected["GET", kind] > 0
    assert 0 < (REQUESTS.total() - before).retries <= proxy.num_faults


def test_files_read_in_parts_name_the_error(server: Server, start_proxy: StartProxy) -> None:
    """An absent file, lasting corruption and a server that breaks off raise errors with the URI."""
    proxy = start_proxy(server.endpoint, 0.0, "corrupt_body", "short_body")
    store, uri = ObjectStore((server.uri,)), f"{server.uri}/wrong"
    with pytest.raises(ObjectNotFound, match=uri):
        scan_checked(store, uri, digest_of)
    store.put(uri, content(0))
    with pytest.raises(ValueError, match=f"{uri}: the parts do not make the whole"):
        scan_checked(store, uri, digest_of)
    proxy.rate = 1.0
    proxy.weights = dict.fromkeys(["corrupt_body", "stall", "slow_down", *REFUSALS], 0.0)
    with pytest.raises(StoreError, match=rf"{uri}: .*10 attempts"):
        scan_checked(store, uri, digest_of)
