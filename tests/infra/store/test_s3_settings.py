"""What the environment says of S3 reaches the requests of jobs and of s3fs."""

import io
import re
from dataclasses import fields
from pathlib import Path

import pytest
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.httpsession import URLLib3Session

from infra.store.file_system import file_system
from infra.store.object_store import ObjectStore, StoreError
from infra.store.s3_settings import S3Settings
from tests.infra.store.quirky_s3 import quirky_s3
from tests.s3_server import CREDENTIALS, set_endpoint

STORE = ObjectStore(("s3://bucket",))
VARIABLES = [f"AWS_{field.name.upper()}" for field in fields(S3Settings)]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[AWSPreparedRequest]:
    """Return the requests to a store that answers each by 200."""
    set_endpoint("http://store.example", monkeypatch)
    requests: list[AWSPreparedRequest] = []

    def send(_: URLLib3Session, prepared: AWSPreparedRequest) -> AWSResponse:
        requests.append(prepared)
        body = b"1" if prepared.method == "GET" else b""
        body = LISTING if "list-type" in prepared.url else body
        return AWSResponse(prepared.url, 200, {"Content-Length": str(len(body))}, Body(body))

    monkeypatch.setattr(URLLib3Session, "send", send)
    return requests


LISTING = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


class Body(io.BytesIO):
    def stream(self, *_: object, **__: object) -> list[bytes]:
        return [self.read()]


def header(request: AWSPreparedRequest, name: str) -> str:
    value = request.headers.get(name, "")
    return value.decode() if isinstance(value, bytes) else value


@pytest.mark.parametrize(
    ("style", "url"),
    [
        ("path", "http://store.example/bucket/key"),
        ("virtual", "http://bucket.store.example/key"),
        ("PATH", "http://store.example/bucket/key"),
    ],
)
def test_the_addressing_style_reaches_requests(
    sent: list[AWSPreparedRequest], monkeypatch: pytest.MonkeyPatch, style: str, url: str
) -> None:
    """In the bucket's place, also of the first contact with a bucket."""
    monkeypatch.setenv("AWS_S3_ADDRESSING_STYLE", style)
    STORE.put("s3://bucket/key", b"1")
    first, second = sent
    assert second.url == url
    assert first.url.rstrip("/") == url.removesuffix("/key")


def test_a_profile_says_what_the_environment_does_not(
    sent: list[AWSPreparedRequest], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The standard file of settings has region and addressing style, too."""
    (tmp_path / "config").write_text(
        "[default]\nregion = eu-west-3\ns3 =\n  addressing_style = path\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    STORE.put("s3://bucket/key", b"1")
    assert sent[-1].url == "http://store.example/bucket/key"
    assert "/eu-west-3/s3/" in header(sent[-1], "Authorization")


def test_the_region_signs_requests(
    sent: list[AWSPreparedRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
    STORE.put("s3://bucket/key", b"1")
    assert all("/eu-west-3/s3/" in header(each, "Authorization") for each in sent)


def test_the_requester_pays_for_each_request_that_can_say_so(
    sent: list[AWSPreparedRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads, writes and removals; HeadBucket, the first contact, has no payer."""
    monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
    STORE.put("s3://bucket/key", b"1")
    STORE.head("s3://bucket/key")
    assert STORE.get("s3://bucket/key") == b"1"
    assert STORE.list("s3://bucket/folder") == []
    STORE.delete("s3://bucket/key")
    named = [header(each, "x-amz-request-payer") for each in sent]
    assert named == ["", *["requester"] * 6]  # a listing is asked for twice


@pytest.mark.parametrize("calculation", ["when_required", "when_supported"])
def test_checksums_are_sent_where_they_are_asked_for(
    sent: list[AWSPreparedRequest], monkeypatch: pytest.MonkeyPatch, calculation: str
) -> None:
    """Content-MD5 always, a CRC32 on request."""
    STORE.put("s3://bucket/key", b"1")
    assert not [name for name in sent[-1].headers if "crc32" in name.lower()]
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", calculation)
    STORE.put("s3://bucket/key", b"1")
    algorithm = header(sent[-1], "x-amz-sdk-checksum-algorithm")
    assert algorithm == ("CRC32" if calculation == "when_supported" else "")
    assert header(sent[-1], "Content-MD5") == "xMpCOKC5I4INzFCab3WEmw=="


@pytest.mark.parametrize(
    ("validation", "asked"), [("", "ENABLED"), ("when_supported", "ENABLED"), ("when_required", "")]
)
def test_stored_checksums_are_asked_for_unless_the_store_knows_none(
    sent: list[AWSPreparedRequest], monkeypatch: pytest.MonkeyPatch, validation: str, asked: str
) -> None:
    monkeypatch.setenv("AWS_RESPONSE_CHECKSUM_VALIDATION", validation)
    assert STORE.get("s3://bucket/key") == b"1"
    assert header(sent[-1], "x-amz-checksum-mode") == asked


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_value_out_of_range_is_refused_by_its_variable(
    sent: list[AWSPreparedRequest], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Before any request; an empty variable says nothing."""
    monkeypatch.setenv(variable, "no such")
    with pytest.raises(StoreError, match=rf"^{variable}: .* = 'no such': need "):
        STORE.put("s3://bucket/key", b"1")
    with pytest.raises(StoreError, match=rf"^{variable}: "):
        file_system("s3://bucket")
    assert not sent
    monkeypatch.setenv(variable, "")
    STORE.put("s3://bucket/key", b"1")


def test_the_page_has_each_variable() -> None:
    """In the order of the record."""
    page = (Path(__file__).parents[3] / "docs" / "stores.md").read_text()
    assert re.findall(r"^\| `(AWS_\w+)` \|", page, re.M) == VARIABLES


def test_s3fs_has_the_same_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of its client, and the payer in a request to a server."""
    for name, value in {
        "AWS_S3_ADDRESSING_STYLE": "path",
        "AWS_REQUEST_PAYER": "requester",
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
    }.items():
        monkeypatch.setenv(name, value)
    with quirky_s3() as (endpoint, settings):
        set_endpoint(endpoint, monkeypatch)
        monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-3")
        settings.objects["key"] = b"1"
        assert file_system("s3://bucket").cat_file("s3://bucket/key") == b"1"
        (asked,) = settings.headers
    assert asked["x-amz-request-payer"] == "requester"
    assert "x-amz-checksum-mode" not in asked
    assert f"{CREDENTIALS['AWS_ACCESS_KEY_ID']}/" in asked["Authorization"]
    assert "/eu-west-3/s3/" in asked["Authorization"]
