"""Seal JSON documents with the SHA-256 of their contents, so that damage is detected."""

import hashlib
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints, is_typeddict

from infra.settings import printable, shown

T = TypeVar("T")

_SEAL = "sha256"
_NAMED = "objects"
_MOST = 2**63 - 1
_NEEDS = {
    int: "a whole number from 0",
    float: "a finite number",
    str: "text",
    bool: "true or false",
}


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
    """Return the objects that an unsealed document names, in its order.

    TypeError if it names them in another way than `naming`.
    """
    return tuple(typed_record(NamedObject, each) for each in document.get(_NAMED, ()))


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
        digest = stated if _is_as_sealed(data, stated) else _digest(document)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        said = printable(str(error))
        raise ValueError(f"not JSON with a digest of its own ({said}): {remedy}") from error
    if digest != stated:
        states = stated if _is_digest(stated) else shown(stated)
        raise ValueError(f"SHA-256 of what it says is {digest}, it states {states}: {remedy}")
    sealed: dict[str, Any] = document
    return sealed


def read_sealed(data: bytes, remedy: str, parse: Callable[[dict[str, Any]], T]) -> T:
    """Return `parse` of a sealed document; ValueError, too, where its fields are others.

    A digest shows that nothing was damaged. An older version, or a forger, wrote other fields.
    """
    document = unseal(data, remedy)
    try:
        return parse(document)
    except (KeyError, TypeError, AttributeError) as error:
        said = printable(f"{type(error).__name__}: {error}")
        raise ValueError(f"other fields than its writer's ({said}): {remedy}") from error


def typed_record(cls: type[T], fields: Any) -> T:  # noqa: ANN401 - as JSON has it
    """Make a record of a JSON object's fields; TypeError if one is missing, unknown, or no such.

    Text, flags, finite numbers, whole numbers from 0 to 2^63 - 1 and objects of these are checked,
    and no other types.
    """
    if not isinstance(fields, dict):
        raise TypeError(f"{shown(fields)}: need an object")
    for name, hint in _hints(cast(Hashable, cls)):
        if name in fields:
            typed_value(fields, name, hint)
    return cls(**fields)


def typed_value(document: Mapping[str, Any], name: str, kind: Any) -> Any:  # noqa: ANN401
    """Return a field of a JSON object; TypeError if it is missing or of another kind.

    A kind is int, float, str or bool, a TypedDict, or a list or dict of these, of each other, or of
    Any. An object may have other fields than its TypedDict.
    """
    if name not in document:
        raise TypeError(f"no {name}: need {_need(kind)}")
    if not _is_of(document[name], kind):
        raise TypeError(f"{name} = {shown(document[name])}: need {_need(kind)}")
    return document[name]


def _need(kind: Any) -> str:  # noqa: ANN401
    if is_typeddict(kind):
        optional = dict.fromkeys(kind.__optional_keys__, "perhaps ")
        fields = (f"{optional.get(n, '')}{n}: {_need(h)}" for n, h in _hints(kind))
        return f"an object with {', '.join(fields)}"
    inner = get_args(kind)
    if get_origin(kind) is list:
        return f"a list, each {_need(inner[0])}"
    if inner:
        return f"an object, each value {_need(inner[1])}"
    return _NEEDS.get(kind, "any value")


@cache
def _hints(cls: Any) -> tuple[tuple[str, Any], ...]:  # noqa: ANN401
    hints = get_type_hints(cls).items()
    return tuple((name, hint) for name, hint in hints if _is_checked(hint))


def _is_checked(hint: Any) -> bool:  # noqa: ANN401
    return hint in _NEEDS or is_typeddict(hint) or get_origin(hint) in (Mapping, dict, list)


def _is_of(value: object, hint: Any) -> bool:  # noqa: ANN401
    if hint is int:
        return type(value) is int and 0 <= value <= _MOST
    if hint is float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        return is_number and -_MOST <= cast(float, value) <= _MOST  # NaN is in no range
    if hint in (str, bool):
        return type(value) is hint
    if is_typeddict(hint):
        is_whole = isinstance(value, dict) and hint.__required_keys__ <= value.keys()
        fields = cast(dict[str, Any], value) if is_whole else {}
        given = ((fields[name], each) for name, each in _hints(hint) if name in fields)
        return is_whole and all(_is_of(each, its) for each, its in given)
    if not isinstance(value, list if get_origin(hint) is list else dict):
        return False
    inner, elements = get_args(hint)[-1], value if isinstance(value, list) else value.values()
    return not _is_checked(inner) or all(_is_of(each, inner) for each in elements)


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and len(value) == 64 and value.isalnum()


def unseal_exactly(data: bytes, remedy: str) -> dict[str, Any]:
    """Unseal as `unseal` does, and refuse blanks that `seal` does not write."""
    document = unseal(data, remedy)
    if data not in (seal(document), seal(document, indent=1)):
        raise ValueError(f"other blanks than its writer's: {remedy}")
    return document


def _is_as_sealed(data: bytes, stated: object) -> bool:
    """Return whether the bytes without their seal have the stated digest.

    Writing the document again takes a third of the time in which a resume reads its commits. What
    is indented needs it.
    """
    if not _is_digest(stated):
        return False
    before, seal, after = data.partition(f', "{_SEAL}": "{stated}"'.encode())
    return bool(seal) and hashlib.sha256(before + after.removesuffix(b"\n")).hexdigest() == stated


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
