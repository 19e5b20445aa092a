"""Change valid objects: their bytes, or the values, keys and nesting of their JSON."""

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from hypothesis import strategies as st

HUGE = b"\xff\xff\xff\x7f", b"\xff" * 8, b"\0" * 8, b"9" * 5000, b"[" * 100_000, b'{"a":' * 50_000
"""Lengths that no object has, a number of 5,000 digits, and brackets that no stack holds."""

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**30, -1.5, 1e308, float("nan"), float("inf")),
    *("", "\ud800", "\0", "../../etc", "a\nb", "x" * 5000, "s3://k:canary@b/x", "2020-01-01"),
    *([], {}, [None], [[]], {"": {}}, {"tensor": -1}, {"items": [[[], 0]]}),
)
"""Values that no valid field has; 1 and 0 may be valid, and then make another object."""


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Flip bits, cut, insert, repeat or overwrite one to three times."""
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        end = min(len(data), place + draw(st.integers(1, 40)))
        kind = draw(st.sampled_from(("flip", "cut", "drop", "insert", "repeat", "huge")))
        if kind == "flip" and data:
            flipped = data[place] ^ (1 << draw(st.integers(0, 7)))
            data = data[:place] + bytes([flipped]) + data[place + 1 :]
        elif kind == "cut":
            data = data[:place]
        elif kind == "drop":
            data = data[:place] + data[end:]
        elif kind == "insert":
            data = data[:place] + draw(st.binary(max_size=16)) + data[place:]
        elif kind == "repeat":
            data = data[:place] + data[place:end] * 2 + data[end:]
        else:
            data = data[:place] + draw(st.sampled_from(HUGE)) + data[end:]
    return data


def places_of(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values within a document, six deep at most."""
    keys = list(document) if isinstance(document, dict) else range(_length(document))
    if len(path) == 6:
        return [path]
    below = [places_of(document[key], (*path, key)) for key in keys]
    return [*([path] if path else []), *(each for found in below for each in found)]


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 0


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """Replace, remove, add or nest one to three values of a document, which stays as it is."""
    document = deepcopy(document)
    for _ in range(draw(st.integers(1, 3))):
        if not (places := places_of(document)):
            return document
        *above, key = draw(st.sampled_from(places))
        parent = document
        for each in above:
            parent = parent[each]
        kind = draw(st.sampled_from(("replace", "remove", "add", "nest")))
        if kind == "replace":
            parent[key] = deepcopy(draw(st.sampled_from(ODD_VALUES)))
        elif kind == "remove":
            del parent[key]
        elif kind == "nest":
            parent[key] = _nested(draw(st.sampled_from((1, 200, 5_000))))
        elif isinstance(parent, dict):
            parent[draw(st.sampled_from(("", "added", "\ud800", "sha256")))] = 1
        else:
            parent.append(deepcopy(draw(st.sampled_from(ODD_VALUES))))
    return document


@st.composite
def changed_json(draw: st.DrawFn, document: Any, seal: Callable[[Any], bytes]) -> bytes:
    """Change a document, then write it as its writer would, with the right digest if it has one.

    What is nested too deeply to be written so is written by hand.
    """
    if draw(st.integers(0, 9)) == 0:
        depth = draw(st.sampled_from((900, 100_000)))
        return b'{"a":' * depth + b"1" + b"}" * depth
    found = draw(changed(document))
    try:
        return seal(found)
    except RecursionError:
        return json.dumps(document).encode()[:-1] + b', "deep": ' + b"[" * 99_999


@st.composite
def repeated_key(draw: st.DrawFn, data: bytes) -> bytes:
    """Write a key of the outermost object of a JSON text twice, with another value first."""
    key = draw(st.sampled_from(list(json.loads(data))))
    value = json.dumps(draw(st.sampled_from(ODD_VALUES)))
    return data.replace(b"{", f"{{{json.dumps(key)}: {value}, ".encode(), 1)
