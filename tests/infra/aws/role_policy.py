"""Evaluate the S3 statements of a step's role, as IAM does, against requests of moto's log."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from jobs.roles import template

RESOURCES = template({})["Resources"]
PLACES = {
    "AWS::Partition": "aws",
    "AWS::StackName": "megahour",
    "AWS::URLSuffix": "amazonaws.com",
    "AWS::Region": "us-east-1",
    "AWS::AccountId": "123456789012",
    "Bucket": "megahour",
    "RunPrefix": "runs/tiny",
    "CorpusBucket": "megahour",
    "CorpusPrefix": "runs/tiny/corpus",
    "CodePrefix": "code",
    "LogGroup": "/megahour/megahour",
}
# Lines of other answers than 200 may be coloured.
_LINE = re.compile(r'"(?:\x1b\[[\d;]*m)*(GET|HEAD|PUT|POST|DELETE) (\S+) HTTP/1\.1\S*" (\d{3})')
_ACTIONS = {"GET": "GetObject", "HEAD": "GetObject", "PUT": "PutObject", "DELETE": "DeleteObject"}


@dataclass(frozen=True)
class Request:
    """Request holds the action, the object or bucket, and the prefix of a listing."""

    action: str
    resource: str
    prefix: str | None = None


@dataclass(frozen=True)
class Statement:
    """Statement allows actions on resources; a listing by what it says of `s3:prefix`."""

    actions: tuple[str, ...]
    resources: tuple[str, ...]
    prefixes: tuple[str, ...] = ()
    allows_no_prefix: bool = True

    def allows(self, request: Request) -> bool:
        """Return whether the statement allows the request; IAM denies what no statement allows."""
        if request.action not in self.actions or not _like(request.resource, self.resources):
            return False
        if not self.prefixes:
            return True
        if request.prefix is None:
            return self.allows_no_prefix
        return _like(request.prefix, self.prefixes)


def role_of(step: str, places: Mapping[str, str] = PLACES) -> list[Statement]:
    """Read the statements of a step's role from the template, with its parameters filled in."""
    name = "".join(part.capitalize() for part in step.split("_"))
    role = RESOURCES[f"{name}Role"]["Properties"]
    (policy,) = role["Policies"]
    return [_statement(_filled(each, places)) for each in policy["PolicyDocument"]["Statement"]]


def allows(role: list[Statement], request: Request) -> bool:
    """Return whether any statement allows the request."""
    return any(statement.allows(request) for statement in role)


def logged_requests(log: str) -> Iterator[Request]:
    """Yield the S3 requests of moto's log; what is absent is asked of the bucket's listing, too."""
    for method, target, status in _LINE.findall(log):
        parts = urlsplit(target)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        if bucket == "moto-api" or (method == "PUT" and not key):
            continue  # the tests' own
        if not key:
            prefix = parse_qs(parts.query, keep_blank_values=True).get("prefix", [None])[0]
            yield Request("s3:ListBucket", f"arn:aws:s3:::{bucket}", prefix)
            continue
        yield Request(f"s3:{_ACTIONS[method]}", f"arn:aws:s3:::{bucket}/{key}")
        if status == "404":
            yield Request("s3:ListBucket", f"arn:aws:s3:::{bucket}")


def requests_by_step(log: str, run: str) -> dict[str, set[Request]]:
    """Return each step's requests: those until it deletes its start record, which is its last."""
    found: dict[str, set[Request]] = {}
    current: set[Request] = set()
    record = re.compile(rf"arn:aws:s3:::{re.escape(run)}/steps/started/(\w+)\.json")
    for request in logged_requests(log):
        current.add(request)
        started = record.fullmatch(request.resource)
        if started and request.action == "s3:DeleteObject":
            found.setdefault(started[1], set()).update(current)
            current = set()
    return found


def _statement(document: Mapping[str, Any]) -> Statement:
    assert document["Effect"] == "Allow"
    actions, resources = tuple(document["Action"]), tuple(document["Resource"])
    if "Condition" not in document:
        return Statement(actions, resources)
    ((operator, keys),) = document["Condition"].items()
    assert operator in ("StringLike", "StringLikeIfExists")
    assert list(keys) == ["s3:prefix"]
    return Statement(actions, resources, tuple(keys["s3:prefix"]), operator.endswith("IfExists"))


def _filled(document: Any, places: Mapping[str, str]) -> Any:
    """Replace each substitution by its text."""
    if isinstance(document, list):
        return [_filled(each, places) for each in document]
    if not isinstance(document, dict):
        return document
    if list(document) == ["Fn::Sub"]:
        return re.sub(r"\$\{([\w:]+)\}", lambda found: places[found[1]], document["Fn::Sub"])
    return {key: _filled(each, places) for key, each in document.items()}


def _like(text: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a text is like one of the patterns: IAM's * and ?, which match slashes."""
    forms = (re.escape(each).replace(r"\*", ".*").replace(r"\?", ".") for each in patterns)
    return any(re.fullmatch(form, text, re.DOTALL) for form in forms)
