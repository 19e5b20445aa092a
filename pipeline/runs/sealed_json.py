"""Seal JSON documents with the SHA-256 of their contents, so that damage is detected."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

_SEAL = "sha256"


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


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
