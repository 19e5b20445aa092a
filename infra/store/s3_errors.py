"""Classify S3's errors: those about one object, those about access, and those that may pass.

An answer about one object, absent or denied, is believed when it is repeated. An answer about
access (credentials, clock, throttling) is retried, with fresh credentials where those may help.
"""

import os
import re
from urllib.parse import urlsplit

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    CredentialRetrievalError,
    EndpointConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    ProxyConnectionError,
    SSLError,
    SSOError,
    TokenRetrievalError,
)
from botocore.parsers import ResponseParserError

from infra.settings import shown
from infra.store.objects import (
    AccessDenied,
    ObjectDenied,
    ObjectNotFound,
    RequestRefused,
    StoreError,
)
from infra.store.uris import split_s3
from infra.task_metrics import RequestCounts

# Of these the next attempt may find fresh ones: a rotated file, a token service that had failed.
_LAPSED_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    SSOError,
    TokenRetrievalError,
)
_NO_CREDENTIALS = (*_LAPSED_CREDENTIALS, ProfileNotFound)
# A HEAD has no body that names the cause: an expired token is a bare 400 there.
_LAPSED_CODES = {
    "400",
    "ExpiredToken",
    "ExpiredTokenException",
    "InvalidToken",
    "RequestExpired",
    "TokenRefreshRequired",
}
_SKEWED = "RequestTimeTooSkewed"
_ARCHIVED = "InvalidObjectState"
_RENEW = "renew the credentials (AWS_SESSION_TOKEN, or those of AWS_PROFILE)"
_REMEDIES = {
    _ARCHIVED: "restore the object from its archive, then run the step again",
    _SKEWED: "set this machine's clock, then run the step again",
    "400": f"{_RENEW}, or check AWS_DEFAULT_REGION, AWS_ENDPOINT_URL and the URI",
    **dict.fromkeys(_LAPSED_CODES - {"400"}, f"{_RENEW}, then run the step again"),
    "InvalidAccessKeyId": "check AWS_ACCESS_KEY_ID, or the one of AWS_PROFILE, and whether "
    "AWS_ENDPOINT_URL is the store that knows it",
    "SignatureDoesNotMatch": "check AWS_SECRET_ACCESS_KEY, or the one of AWS_PROFILE, and "
    "proxies that alter headers",
}
_CHECK_POLICY = (
    "check the credentials and the bucket's policy (an absent object is refused too, without "
    "s3:ListBucket; so is any whose requester pays, without AWS_REQUEST_PAYER=requester)"
)
_REDIRECTS = {301, 302, 307, 308}
_OTHER_REGION_CODES = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "InvalidLocationConstraint",
    "InvalidRegion",
}
_EXPECTED_REGION = re.compile(r"expecting '([^']+)'")
OPERATIONS = {
    "GetObject": RequestCounts(get=1),
    "PutObject": RequestCounts(put=1),
    "HeadObject": RequestCounts(head=1),
    "HeadBucket": RequestCounts(head=1),
    "ListObjectsV2": RequestCounts(list=1),
    "DeleteObject": RequestCounts(),  # free
}
"""The operations that we request of S3, and as what each counts."""

_DENIED_CODES = {"AccessDenied", "Forbidden", "403"}
_ABSENT_CODES = {"NoSuchKey", "NotFound", "404"}

# 409: another conditional write or delete was in progress; it may have left no object.
_TRANSIENT_STATUSES = {401, 408, 409, 429, 500, 502, 503, 504}
# These come as 400: the server waited for our body, or received another than we sent.
_TRANSIENT_CODES = {
    "BadDigest",
    "IncompleteBody",
    "RequestTimeout",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
# Of gateways and compatible stores too; some send them as 400.
_THROTTLED_CODES = {
    "BandwidthLimitExceeded",
    "LimitExceededException",
    "PriorRequestNotComplete",
    "ProvisionedThroughputExceededException",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestThrottledException",
    "SlowDown",
    "ThrottledException",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "TooManyRequestsException",
}


class CorruptTransferError(Exception):
    """CorruptTransferError says that the bytes received are not the bytes sent."""


class ListingFaultError(Exception):
    """ListingFaultError says that a store's pages are not those of one listing by key.

    Pages after such a one could lack objects, and nothing would tell.
    """


class NoTurnError(Exception):
    """NoTurnError says that a throttled host's requests left no turn for this one."""


# Failures between connecting and the last byte of an answer, or in its XML.
_BROKEN = (
    ConnectTimeoutError,
    EndpointConnectionError,
    ProxyConnectionError,
    HTTPClientError,
    IncompleteReadError,
    FlexibleChecksumError,
    ResponseParserError,
    CorruptTransferError,
)


TRANSPORT_ERRORS = (
    BotoCoreError,
    ClientError,
    ResponseParserError,
    CorruptTransferError,
    ListingFaultError,
    NoTurnError,
)
"""All errors that boto3 and our own checks raise when a request fails."""


def is_transient(error: Exception) -> bool:
    """Return whether the same request may succeed if it is retried."""
    if isinstance(error, ClientError):
        status, code = http_status(error), _code(error)
        passes = status in _TRANSIENT_STATUSES or code in {*_TRANSIENT_CODES, _SKEWED}
        return passes or is_throttled(error) or is_lapsed(error)
    if isinstance(error, SSLError):
        return "CERTIFICATE_VERIFY_FAILED" not in str(error)
    return isinstance(error, _BROKEN) or is_lapsed(error)


def is_throttled(error: Exception) -> bool:
    """Return whether the store asks for fewer requests."""
    return isinstance(error, ClientError) and (
        http_status(error) in {429, 503} or _code(error) in _THROTTLED_CODES
    )


def is_lapsed(error: Exception) -> bool:
    """Return whether the request lacked valid credentials, where fresh ones may be found."""
    if not isinstance(error, ClientError):
        return isinstance(error, _LAPSED_CREDENTIALS)
    is_of_token_service = error.operation_name not in OPERATIONS
    return is_of_token_service or http_status(error) == 401 or _code(error) in _LAPSED_CODES


def refusal_of(error: Exception) -> int:
    """Return the status by which an answer says that an object is denied or absent, or 0.

    One such answer may be wrong.
    """
    is_answer = isinstance(error, ClientError) and not is_transient(error)
    status = http_status(error) if is_answer else 0
    return status if status in {403, 404} else 0


def is_misconfigured(error: Exception) -> bool:
    """Return whether a process that begins should stop: a wrong endpoint, or no credentials."""
    return isinstance(
        error,
        EndpointConnectionError
        | ProxyConnectionError
        | NoCredentialsError
        | PartialCredentialsError,
    )


def store_error(error: Exception, uri: str, how_often: str = "") -> StoreError:
    """Turn a transport error into the error that the user sees.

    Its message names the URI, the event, the endpoint, the attempts and a remedy.
    """
    if isinstance(error, ClientError):
        return _refusal(error, uri, how_often)
    if isinstance(error, _NO_CREDENTIALS):
        remedy = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        cause = type(error).__name__
        return AccessDenied(f"{uri}: no usable credentials: {remedy} ({cause}){_suffix(how_often)}")
    if isinstance(error, ParamValidationError):  # s3://bucket alone
        return ObjectNotFound(f"{uri}: names a bucket, not an object: check the key")
    if isinstance(error, NoTurnError):
        event = str(error)
        remedy = "the store throttles: run fewer tasks at a time, or run the step again later"
    elif isinstance(error, CorruptTransferError):
        event = str(error)
        remedy = "check the store's disks, and proxies that alter bytes on the way"
    elif isinstance(error, ListingFaultError):
        event = str(error)
        remedy = (
            "objects could be lost from it: use a store whose ListObjectsV2 answers in the order "
            "of the keys' bytes, as general-purpose buckets of AWS S3 do and its directory "
            "buckets do not"
        )
    else:
        event = type(error).__name__
        remedy = "check AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and the network"
    return StoreError(f"{uri}: {event} at {endpoint()}: {remedy}{_suffix(how_often)}")


def _refusal(error: ClientError, uri: str, how_often: str) -> StoreError:
    code, status = _code(error), http_status(error)
    if code == "NoSuchBucket":
        return missing_bucket(split_s3(uri)[0], uri)
    if status == 404 and code in _ABSENT_CODES:
        return ObjectNotFound(f"{uri}: no such object: check the key")
    if code == _ARCHIVED:
        return StoreError(f"{uri}: archived ({status} {code}): {_REMEDIES[code]}")
    answer = f"the store answered {status} {code} at {endpoint()}"
    if status in _REDIRECTS or code in _OTHER_REGION_CODES:
        remedy = _region_remedy(error)
    elif status in {401, 403} or is_lapsed(error):
        is_of_object = code in _DENIED_CODES and error.operation_name.endswith("Object")
        denied = ObjectDenied if is_of_object else AccessDenied
        remedy = _REMEDIES.get(code, _CHECK_POLICY)
        return denied(f"{uri}: refused ({status} {code}): {remedy}{_suffix(how_often)}")
    elif is_transient(error):
        remedy = _REMEDIES.get(code, "try again later")
        return StoreError(f"{uri}: {answer}: {remedy}{_suffix(how_often)}")
    else:
        remedy = "check the URI and AWS_ENDPOINT_URL"
    return RequestRefused(uri, answer, remedy)


def _region_remedy(error: ClientError) -> str:
    """Name the region or the address that the answer expects, if it says so."""
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    details: dict[str, str] = dict(error.response.get("Error", {}))
    expected = _EXPECTED_REGION.search(details.get("Message", ""))
    region = details.get("Region") or headers.get("x-amz-bucket-region")
    region = region or (expected[1] if expected else "")
    address = details.get("Endpoint") or headers.get("location")
    return (
        f"set AWS_DEFAULT_REGION to the bucket's region{f' {shown(region)}' if region else ''}, "
        f"or AWS_ENDPOINT_URL to its endpoint{f' {shown(address)}' if address else ''}"
    )


def _suffix(how_often: str) -> str:
    return f" ({how_often})" if how_often else ""


def missing_bucket(bucket: str, uri: str) -> StoreError:
    """Make the error for a bucket that does not exist."""
    remedy = "create it, or correct its name or AWS_ENDPOINT_URL"
    return StoreError(f"{uri}: no bucket {bucket!r} at {endpoint()}: {remedy}")


def endpoint() -> str:
    """Return the server's host and port, for messages."""
    url = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    # The host alone: a URL may hold a password.
    return urlsplit(url).netloc.rpartition("@")[2] if url else "AWS"


def http_status(error: ClientError) -> int:
    """Return the HTTP status of the answer, or 0 if there was no answer."""
    status: int = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return status


def _code(error: ClientError) -> str:
    code: str = error.response.get("Error", {}).get("Code", "")
    return code
