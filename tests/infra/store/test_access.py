"""Answers about one object are errors of that object; all others are errors of access."""

from pathlib import Path

import pytest
from botocore.exceptions import ClientError, CredentialRetrievalError

from infra.store import retry
from infra.store.object_store import (
    AccessDenied,
    ObjectDenied,
    ObjectNotFound,
    ObjectStore,
    StoreError,
)
from infra.store.s3_errors import is_lapsed, is_transient, store_error
from infra.task_metrics import REQUESTS
from tests.faults.failing_store.scripted_server import Request, Serve

URI = "s3://bucket/key"


class Refusing:
    """Refusing refuses the first GETs as scripted, and those signed by a lapsed key id."""

    def __init__(self) -> None:
        self.refusals: list[tuple[int, str]] = []
        self.details = "<Message>injected</Message>"
        self.head_status = 200
        self.lapsed_key = ""
        self.credentials = Path()

    def __call__(self, request: Request) -> None:
        if request.method == "HEAD":
            request.answer(status=f"{self.head_status} X")
        elif self.lapsed_key and f"={self.lapsed_key}/" in request.headers["authorization"]:
            write_credentials(self.credentials, "renewed")
            request.answer(b"<Error><Code>ExpiredToken</Code></Error>", "400 X")
        elif self.refusals:
            status, code = self.refusals.pop(0)
            error = f"<Error><Code>{code}</Code>{self.details}</Error>"
            request.answer(error.encode() if code else b"", f"{status} X")
        else:
            request.answer(b"audio")


def write_credentials(file: Path, key: str) -> None:
    lines = ("[default]", f"aws_access_key_id={key}", "aws_secret_access_key=s")
    file.write_text("\n".join((*lines, "aws_session_token=t", "")), encoding="utf-8")


@pytest.fixture
def server(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Refusing:
    monkeypatch.setattr(retry, "FIRST_WAIT_S", 0.001)
    serve(script := Refusing(), greets=False)
    return script


ABSENT_OR_DENIED = [
    (404, "NoSuchKey", ObjectNotFound),
    (404, "", ObjectNotFound),
    (403, "AccessDenied", ObjectDenied),
    (403, "", ObjectDenied),
]


def test_absence_and_denial_are_believed_at_the_fourth_answer(server: Refusing) -> None:
    """Three such answers and then the bytes are the bytes; four are the error of this object."""
    store = ObjectStore(("s3://bucket",))
    for status, code, error in ABSENT_OR_DENIED:
        before = REQUESTS.total()
        server.refusals = [(status, code)] * 3
        assert store.get(URI) == b"audio"
        server.refusals = [(status, code)] * 4
        with pytest.raises(error, match=URI):
            store.get(URI)
        made = REQUESTS.total() - before
        assert (made.get, made.retries) == (8, 0), "an answer is no failure"


def test_contradicting_refusals_are_asked_on(server: Refusing) -> None:
    """Denied once among answers of absence: four in a row are believed, and a fifth is not sent."""
    absent, denied = (404, "NoSuchKey"), (403, "AccessDenied")
    server.refusals = [absent] * 3 + [denied] + [absent] * 5
    with pytest.raises(ObjectNotFound, match=URI):
        ObjectStore(("s3://bucket",)).get(URI)
    assert server.refusals == [absent]


PASSING = [
    (400, "ExpiredToken"),
    (400, "TokenRefreshRequired"),
    (400, "InvalidToken"),
    (400, ""),
    (403, "RequestTimeTooSkewed"),
    (403, "ExpiredToken"),
    (401, "Unauthorized"),
    (401, ""),
    (400, "SlowDown"),
    (400, "Throttling"),
    (400, "ThrottlingException"),
    (400, "RequestLimitExceeded"),
    (400, "RequestThrottled"),
    (403, "TooManyRequestsException"),
    (429, ""),
]


def test_what_waiting_may_heal_is_retried(server: Refusing) -> None:
    """Such an answer costs a retry, whatever its status, and never an object."""
    store = ObjectStore(("s3://bucket",))
    for status, code in PASSING:
        before = REQUESTS.total()
        server.refusals = [(status, code)]
        assert store.get(URI) == b"audio"
        assert (REQUESTS.total() - before).retries == 1, (status, code)
        answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
        error = store_error(ClientError(answer, "GetObject"), URI)  # type: ignore[arg-type]
        assert not isinstance(error, ObjectNotFound | ObjectDenied), (status, code)


def test_patience_with_access_ends(server: Refusing) -> None:
    """Ten answers of such a kind are an error with the attempts, and not that of an object."""
    server.refusals = [(403, "RequestTimeTooSkewed")] * 10
    message = rf"{URI}: .*403 RequestTimeTooSkewed.*10 attempts"
    with pytest.raises(StoreError, match=message) as caught:
        ObjectStore(("s3://bucket",)).get(URI)
    assert not isinstance(caught.value, ObjectNotFound | ObjectDenied)


def test_throttling_uses_up_no_attempts(server: Refusing) -> None:
    """Twelve throttled answers of any status cost retries, and then the object comes."""
    server.refusals = [(403, "SlowDown")] * 12
    before = REQUESTS.total()
    assert ObjectStore(("s3://bucket",)).get(URI) == b"audio"
    assert (REQUESTS.total() - before).retries == 12


LASTING = [
    (403, "InvalidObjectState", "restore the object from its archive"),
    (403, "InvalidAccessKeyId", "check AWS_ACCESS_KEY_ID"),
    (403, "SignatureDoesNotMatch", "check AWS_SECRET_ACCESS_KEY"),
    (403, "AccountProblem", "check the credentials .*AWS_REQUEST_PAYER=requester"),
    (404, "NoSuchBucket", "create it, or correct its name"),
    (404, "NoSuchAccessPoint", "check the URI and AWS_ENDPOINT_URL"),
    (405, "MethodNotAllowed", "check the URI and AWS_ENDPOINT_URL"),
]


def test_other_refusals_are_of_access(server: Refusing) -> None:
    """An archive, wrong keys and an absent bucket fail with a remedy; no object is to blame."""
    for status, code, remedy in LASTING:
        server.refusals = [(status, code)] * 4
        with pytest.raises(StoreError, match=remedy) as caught:
            ObjectStore(("s3://bucket",)).get(URI)
        assert not isinstance(caught.value, ObjectNotFound | ObjectDenied), code


MALFORMED = "AuthorizationHeaderMalformed"
ELSEWHERE = [
    (400, MALFORMED, "", "region, or"),
    (400, MALFORMED, "<Region>garage</Region>", "region 'garage', or"),
    (400, MALFORMED, "<Message>not 'a'; expecting 'garage'</Message>", "region 'garage', or"),
    (400, "IllegalLocationConstraintException", "", "region, or"),
    (301, "PermanentRedirect", "", "region, or AWS_ENDPOINT_URL to its endpoint$"),
    (301, "PermanentRedirect", "<Endpoint>s3.b.org</Endpoint>", "AWS_ENDPOINT_URL .* 's3.b.org'$"),
    (307, "TemporaryRedirect", "", "region, or"),
]


def test_an_answer_to_another_region_names_the_variable(server: Refusing) -> None:
    """And the region or the endpoint, if the answer does; a HEAD's own redirect has an end."""
    for status, code, details, named in ELSEWHERE:
        server.refusals, server.details = [(status, code)] * 4, details
        server.head_status = status
        with pytest.raises(StoreError, match=rf"{status} {code}.*set AWS_DEFAULT_REGION .*{named}"):
            ObjectStore(("s3://bucket",)).get(URI)


SPOKEN = [
    ("ExpiredToken", "AWS_SESSION_TOKEN"),
    ("RequestTimeTooSkewed", "this machine's clock"),
    ("400", "AWS_SESSION_TOKEN.*AWS_DEFAULT_REGION, AWS_ENDPOINT_URL"),
]


@pytest.mark.parametrize(("code", "remedy"), SPOKEN)
def test_lapsed_access_names_what_to_set(code: str, remedy: str) -> None:
    """A bare 400, as a HEAD has, may be of each."""
    answer = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": 400}}
    with pytest.raises(StoreError, match=remedy):
        raise store_error(ClientError(answer, "GetObject"), URI)  # type: ignore[arg-type]


@pytest.mark.usefixtures("server")
def test_an_endpoint_that_is_no_url_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the variable, and not its value, which may hold a password."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "me:hunter2@localhost:9000")
    with pytest.raises(StoreError, match=r"AWS_ENDPOINT_URL: need a URL") as caught:
        ObjectStore(("s3://bucket",)).get(URI)
    assert "hunter2" not in str(caught.value)


def test_an_expired_token_is_replaced_by_the_one_on_disk(
    server: Refusing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process renews the credentials file meanwhile; the next attempt is signed by it."""
    server.credentials, server.lapsed_key = tmp_path / "credentials", "lapsed"
    write_credentials(server.credentials, "lapsed")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(server.credentials))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    before = REQUESTS.total()
    assert ObjectStore(("s3://bucket",)).get(URI) == b"audio"
    assert (REQUESTS.total() - before).retries == 1


def test_a_token_service_that_fails_is_no_objects_denial() -> None:
    """Its 403 is a ClientError as S3's is, but of another operation: retried, and of access."""
    answer = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    of_service = ClientError(answer, "AssumeRole")  # type: ignore[arg-type]
    for error in (of_service, CredentialRetrievalError(provider="x", error_msg="y")):
        assert is_transient(error)
        assert is_lapsed(error)
        assert type(store_error(error, URI)) is AccessDenied


def test_a_denied_listing_is_no_objects_denial() -> None:
    """It says nothing of the objects below."""
    answer = {"Error": {"Code": "AccessDenied"}, "ResponseMetadata": {"HTTPStatusCode": 403}}
    assert type(store_error(ClientError(answer, "ListObjectsV2"), URI)) is AccessDenied  # type: ignore[arg-type]
