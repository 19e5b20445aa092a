import base64
import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError

from infra.store import retry
from infra.store.object_store import (
    AccessDenied,
    Fetched,
    ObjectNotFound,
    ObjectStore,
    StoreError,
    join_uri,
)
from infra.task_metrics import REQUESTS
from tests.faults.failing_store.scripted_server import Serve
from tests.s3_server import free_port

CEPH = pytest.param("ceph", marks=pytest.mark.cluster)


@pytest.fixture(params=["s3", CEPH])
def bucket(request: pytest.FixtureRequest) -> str:
    """Make a bucket of moto's server, and one of Ceph's."""
    name: str = request.getfixturevalue(f"{request.param}_bucket")
    return name


@pytest.fixture(params=["local", "s3", CEPH])
def base(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a place for objects: local, or in either server."""
    if request.param == "local":
        return str(tmp_path / "store")
    return f"s3://{request.getfixturevalue(f'{request.param}_bucket')}/store"


@pytest.fixture
def store(base: str) -> ObjectStore:
    return ObjectStore((base,))


def test_bytes_come_back(store: ObjectStore, base: str) -> None:
    """get, head and open return what put wrote, and head when; a second put replaces it."""
    uri = join_uri(base, "a", "b c%#?.bin")
    store.put(uri, b"first")
    before = store.head(uri)
    store.put(uri, b"second!")
    after = store.head(uri)
    assert store.get(uri) == b"second!"
    assert (after.uri, after.num_bytes) == (uri, 7)
    assert before.etag != after.etag
    assert after.written_at is not None
    assert abs(datetime.now(UTC) - after.written_at) < timedelta(minutes=10)
    with store.open(uri) as file:
        file.seek(3)
        assert file.read() == b"ond!"


def test_absent_objects_have_their_own_error(store: ObjectStore, base: str) -> None:
    """Every reader raises ObjectNotFound with the URI of an absent object; exists returns False."""
    uri = join_uri(base, "absent")
    for read in (store.get, store.head, store.open):
        with pytest.raises(ObjectNotFound, match="absent"):
            read(uri)
    assert not store.exists(uri)
    store.put(uri, b"")
    assert store.exists(uri)
    assert store.get(uri) == b""
    with pytest.raises(ObjectNotFound):
        store.get(base)


def test_put_if_absent_keeps_the_first(store: ObjectStore, base: str) -> None:
    """The second conditional write returns False and changes nothing."""
    uri = join_uri(base, "commit")
    assert store.put_if_absent(uri, b"winner")
    assert not store.put_if_absent(uri, b"loser")
    assert store.get(uri) == b"winner"


def test_put_if_absent_has_one_winner_in_a_race(store: ObjectStore, base: str) -> None:
    """Of 16 concurrent conditional writers one wins, and its bytes are there."""
    uri = join_uri(base, "race")
    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda i: store.put_if_absent(uri, b"%d" % i), range(16)))
    assert sum(won) == 1
    assert store.get(uri) == b"%d" % won.index(True)


def test_list_is_recursive_sorted_and_stops_at_the_directory(store: ObjectStore, base: str) -> None:
    """list returns everything below prefix/, by URI, and nothing of a sibling prefix2."""
    names = ["run/z", "run/a/2", "run/a/1", "run/a.b", "run2/x"]
    for name in names:
        store.put(join_uri(base, name), b"1")
    expected = sorted(join_uri(base, name) for name in names[:4])
    assert [info.uri for info in store.list(join_uri(base, "run"))] == expected
    assert [info.uri for info in store.list(join_uri(base, "run") + "/")] == expected
    assert sorted(info.uri for info in store.list_each(join_uri(base, "run"))) == expected
    assert (
        store.list(join_uri(base, "empty")) == list(store.list_each(join_uri(base, "empty"))) == []
    )


@pytest.mark.cluster
def test_list_goes_over_pages(ceph_bucket: str) -> None:
    """More objects than one answer of S3 holds (1,000) are all listed, a page when it is read."""
    base = f"s3://{ceph_bucket}/many"
    store = ObjectStore((base,))
    uris = [f"{base}/{i:04}" for i in range(1003)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda uri: store.put(uri, b""), uris))
    assert [info.uri for info in store.list(base)] == uris
    before, found = REQUESTS.total(), store.list_each(base)
    assert [next(found).uri for _ in range(1000)] == uris[:1000]
    first_page = (REQUESTS.total() - before).list
    assert [info.uri for info in found] == uris[1000:]
    assert (REQUESTS.total() - before).list == 2 * first_page


def test_get_many_keeps_order_and_continues_after_errors(store: ObjectStore, base: str) -> None:
    """Objects come in the order of the URIs; an absent or forbidden one comes as its error."""
    uris = [join_uri(base, str(i)) for i in range(20)]
    for i in set(range(20)) - {7}:
        store.put(uris[i], b"%d" % i)
    uris[9] = "/etc/passwd"
    got = list(store.get_many(uris, in_flight=4))
    assert [uri for uri, _ in got] == uris
    assert isinstance(got[7][1], ObjectNotFound)
    assert isinstance(got[9][1], StoreError)
    for i in set(range(20)) - {7, 9}:
        data = b"%d" % i
        assert got[i][1] == Fetched(data, hashlib.md5(data).hexdigest())


def test_local_errors_have_names(tmp_path: Path) -> None:
    """A path below a file is absent; a directory in the way of a write is a StoreError."""
    store = ObjectStore((str(tmp_path),))
    store.put(str(tmp_path / "file"), b"")
    with pytest.raises(ObjectNotFound):
        store.get(str(tmp_path / "file" / "below"))
    (tmp_path / "directory").mkdir()
    with pytest.raises(StoreError, match="directory"):
        store.put(str(tmp_path / "directory"), b"")


def test_a_file_that_is_replaced_is_not_read_as_a_mixture(bucket: str) -> None:
    """Blocks of two objects are never one file's: the second block is refused."""
    store, uri = ObjectStore((f"s3://{bucket}",)), f"s3://{bucket}/x"
    store.put(uri, b"a" * 20_000_000)
    with store.open(uri) as file:
        assert file.read(10) == b"a" * 10
        store.put(uri, b"b" * 20_000_000)
        file.seek(19_000_000)
        with pytest.raises(StoreError, match=rf"{uri}: the store answered 412"):
            file.read(10)


@pytest.mark.usefixtures("bucket")
def test_missing_bucket_is_reported_at_once() -> None:
    """Every operation on an absent bucket names it, the server and the variable."""
    store = ObjectStore(("s3://no-such-bucket",))
    uri = "s3://no-such-bucket/key"
    for act in (store.get, store.exists, store.list, lambda uri: store.put(uri, b"")):
        with pytest.raises(StoreError, match=r"no bucket 'no-such-bucket' at 127.*AWS_ENDPOINT"):
            act(uri)
    boto3.client("s3").create_bucket(Bucket="no-such-bucket")
    assert not store.exists(uri), "a bucket made since is seen"
    boto3.client("s3").delete_bucket(Bucket="no-such-bucket")
    with pytest.raises(StoreError, match="no bucket 'no-such-bucket'"):
        store.get(uri)


def test_unreachable_endpoint_is_reported_at_once(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused connection is a StoreError within seconds and names host and variable."""
    port = free_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://user:hush@127.0.0.1:{port}")
    store = ObjectStore((f"s3://{s3_bucket}",))
    before, begin = REQUESTS.total(), time.monotonic()
    with pytest.raises(StoreError, match=rf"127.0.0.1:{port}: check AWS_ENDPOINT_URL") as caught:
        store.get(f"s3://{s3_bucket}/key")
    assert (REQUESTS.total() - before).retries == 0
    assert time.monotonic() - begin < 20
    assert "hush" not in str(caught.value)


@pytest.mark.cluster
def test_ceph_refuses_a_wrong_secret_at_once(
    ceph_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that checks signatures gives AccessDenied, with what to check, and no retry."""
    store, uri = ObjectStore((f"s3://{ceph_bucket}",)), f"s3://{ceph_bucket}/key"
    store.put(uri, b"secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    before = REQUESTS.total()
    for act in (store.get, store.head, store.list, lambda uri: store.put(uri, b"")):
        # An answer to HEAD has no body, which would say that the signature is wrong.
        remedy = "the credentials" if act == store.head else "AWS_SECRET_ACCESS_KEY"
        with pytest.raises(AccessDenied, match=rf"refused \(403.*check {remedy}"):
            act(uri)
    assert (REQUESTS.total() - before).retries == 0


@pytest.mark.cluster
def test_ceph_refuses_corrupt_uploads(ceph_bucket: str) -> None:
    """We send Content-MD5, and the server compares it with what it received (moto does not)."""
    wrong = base64.b64encode(hashlib.md5(b"other").digest()).decode()
    with pytest.raises(ClientError, match="BadDigest"):
        boto3.client("s3").put_object(Bucket=ceph_bucket, Key="x", Body=b"ours", ContentMD5=wrong)


def test_conflicting_writes_are_tried_again(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """409 names no winner, so the write is retried until 412 says that another writer won."""
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.002)
    statuses = ["412 Precondition Failed", "409 Conflict", "409 Conflict"]
    serve(lambda request: request.answer(status=statuses.pop()))
    assert not ObjectStore(("s3://bucket",)).put_if_absent("s3://bucket/commit", b"ours")
    assert statuses == []
