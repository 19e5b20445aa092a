"""Classify the errors of S3: which are transient, and what error and remedy the user sees."""

import os
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
    ProxyConnectionError,
    SSLError,
)
from botocore.parsers import ResponseParserError

from infra.store.objects import AccessDenied, ObjectNotFound, StoreError
from infra.store.uris import split_s3

_CREDENTIAL_ERRORS = (NoCredentialsError, PartialCredentialsError, CredentialRetrievalError)
_DENIED_CODES = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}

# 409: another conditional write or delete was in progress; it may have left no object.
_TRANSIENT_STATUSES = {408, 409, 429, 500, 502, 503, 504}
# These come as 400: the server waited for our body, or received another than we sent.
_TRANSIENT_CODES = {
    "BadDigest",
    "IncompleteBody",
    "RequestTimeout",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}


class CorruptTransferError(Exception):
    """CorruptTransferError says that the bytes received are not the bytes sent."""


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


TRANSPORT_ERRORS = (BotoCoreError, ClientError, ResponseParserError, CorruptTransferError)
"""All errors that boto3 and our own checks raise when a request fails."""


def is_transient(error: Exception) -> bool:
    """Return whether the same request may succeed if it is retried."""
    if isinstance(error, ClientError):
        return http_status(error) in _TRANSIENT_STATUSES or _code(error) in _TRANSIENT_CODES
    if isinstance(error, SSLError):
        return "CERTIFICATE_VERIFY_FAILED" not in str(error)
    return isinstance(error, _BROKEN)


def is_unreachable(error: Exception) -> bool:
    """Return whether the connection was refused or the host unknown, as at a wrong endpoint."""
    return isinstance(error, EndpointConnectionError | ProxyConnectionError)


def store_error(error: Exception, uri: str, how_often: str = "") -> StoreError:
    """Turn a transport error into the error that the user sees.

    Its message names the URI, the event, the endpoint, the attempts and a remedy.
    """
    if isinstance(error, ClientError):
        return _refusal(error, uri, how_often)
    if isinstance(error, _CREDENTIAL_ERRORS):
        remedy = "set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        return AccessDenied(f"{uri}: no usable credentials: {remedy}")
    if isinstance(error, ParamValidationError):  # s3://bucket alone
        return ObjectNotFound(f"{uri}: names a bucket, not an object: check the key")
    if isinstance(error, CorruptTransferError):
        event = str(error)
        remedy = "check the store's disks, and proxies that alter bytes on the way"
    else:
        event = type(error).__name__
        remedy = "check AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and the network"
    return StoreError(f"{uri}: {event} at {endpoint()}: {remedy}{_suffix(how_often)}")


def _refusal(error: ClientError, uri: str, how_often: str) -> StoreError:
    code, status = _code(error), http_status(error)
    if code == "NoSuchBucket":
        return missing_bucket(split_s3(uri)[0], uri)
    if status == 404:
        return ObjectNotFound(f"{uri}: no such object: check the key")
    if status in {401, 403} or code in _DENIED_CODES:
        remedy = "check the credentials and the bucket's policy (an absent object is refused too,"
        return AccessDenied(f"{uri}: refused ({status} {code}): {remedy} without s3:ListBucket)")
    remedy = "try again later" if is_transient(error) else "check the URI and AWS_ENDPOINT_URL"
    answer = f"the store answered {status} {code} at {endpoint()}"
    return StoreError(f"{uri}: {answer}: {remedy}{_suffix(how_often)}")


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
