"""Seal JSON documents with the SHA-256 of their contents, so that damage is detected."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

_SEAL = "sha256"
_NAMED = "objects"


@dataclass(frozen=True, slots=True)
class NamedObject:
    """NamedObject is an object that a sealed document names: its key, size and SHA-256."""

    key: str
    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, key: str, data: bytes) -> "NamedObject":
        """Name the bytes at `key`."""
        return cls(key, len(data), hashlib.sha256(data).hexdigest())


def naming(document: Mapping[str, Any], objects: Sequence[NamedObject]) -> dict[str, Any]:
    """Add the names of `objects` to a document that will be sealed."""
    return {**document, _NAMED: [asdict(each) for each in objects]}


def named_objects(document: Mapping[str, Any]) -> tuple[NamedObject, ...]:
    """Return the objects that an unsealed document names, in its order."""
    return tuple(NamedObject(**each) for each in document.get(_NAMED, ()))


def seal(document: Mapping[str, Any], indent: int | None = None) -> bytes:
    """Write canonical JSON of `document` with its digest beside its keys, and a newline."""
    plain = json.loads(json.dumps(document))  # as it will be read: keys that are text
    whole = {**plain, _SEAL: _digest(plain)}
    return (json.dumps(whole, sort_keys=True, indent=indent) + "\n").encode()


def unseal(data: bytes, remedy: str) -> dict[str, Any]:
    """Read what `seal` wrote; a ValueError that ends in `remedy` if it is damaged."""
    try:
        document = json.loads(data)
        stated = document.pop(_SEAL)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"not JSON with a digest of its own ({error}): {remedy}") from error
    digest = _digest(document)
    if digest != stated:
        raise ValueError(f"SHA-256 of what it says is {digest}, it states {stated}: {remedy}")
    sealed: dict[str, Any] = document
    return sealed


def unseal_exactly(data: bytes, remedy: str) -> dict[str, Any]:
    """Unseal as `unseal` does, and refuse blanks that `seal` does not write."""
    document = unseal(data, remedy)
    if data not in (seal(document), seal(document, indent=1)):
        raise ValueError(f"other blanks than its writer's: {remedy}")
    return document


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
