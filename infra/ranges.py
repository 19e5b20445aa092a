"""Declare the values that a record's field may have, once, beside its type; and check them.

`num_kept: Annotated[int, Range(1, 1000)]` declares a range. With `__post_init__ = check_ranges` a
record refuses other values, whether code makes it or `infra.configuration.read_record` reads it.
"""

import re
import reprlib
import types
import typing
from collections.abc import Iterator, Mapping, Sized
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeAlias, cast

# A password may hold slashes; a user alone may be a token.
_PASSWORD = re.compile(r"(?<=://)(?:[^/\s:@]*:\S*|[^/\s@]*)@")
_SIGNATURE = re.compile(
    r"([?&][^\s=&]*(?:credential|secret|signature|token)[^\s=&]*=)[^\s&]+", re.IGNORECASE
)
_CONTROL = re.compile("[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80
_SIZE = re.compile(r"([1-9][0-9]{0,9})([mgt])")
_MEBIBYTES = {"m": 1, "g": 1 << 10, "t": 1 << 20}


@dataclass(frozen=True, slots=True)
class Range:
    """Range admits numbers from `least` to `most`, both included; with `below`, `most` is not.

    `zero` says what 0 means where it is a setting of its own.
    """

    least: float
    most: float
    zero: str = ""
    below: bool = False

    def admits(self, value: object) -> bool:
        """Return whether a number lies in the range; NaN lies in none."""
        if not isinstance(value, Real) or isinstance(value, bool):
            return False
        number = cast(float, value)
        if self.zero and number == 0:
            return True
        return self.least <= number < self.most or (number == self.most and not self.below)

    @property
    def need(self) -> str:
        """Describe the range for a message."""
        least, most = _number(self.least), _number(self.most)
        spanned = f"{least} or more, below {most}" if self.below else f"{least}..{most}"
        return f"0 ({self.zero}) or {spanned}" if self.zero else spanned


@dataclass(frozen=True, slots=True)
class Text:
    """Text admits `least` to `most` characters without control characters or a password.

    `form` is a regular expression for the whole text, which `example` satisfies.
    """

    least: int
    most: int
    form: str = ""
    example: str = ""

    def admits(self, value: object) -> bool:
        """Return whether a text is one of these."""
        if not isinstance(value, str) or _CONTROL.search(value) or holds_password(value):
            return False
        fits = self.least <= len(value) <= self.most
        return fits and (not self.form or re.fullmatch(self.form, value) is not None)

    @property
    def need(self) -> str:
        """Describe the text for a message."""
        length = f"{self.least}..{self.most} characters, no control character and no password"
        return f"{length}, such as {self.example!r}" if self.example else length


@dataclass(frozen=True, slots=True)
class MemorySize:
    """MemorySize admits a size in Spark's spelling, such as "4g", of so many mebibytes."""

    least: int
    most: int

    def admits(self, value: object) -> bool:
        """Return whether a text is a size within the bounds."""
        return (
            isinstance(value, str)
            and _SIZE.fullmatch(value) is not None
            and self.least <= mebibytes(value) <= self.most
        )

    @property
    def need(self) -> str:
        """Describe the sizes for a message."""
        return f'a size such as "4g", from {self.least}m to {self.most >> 20}t'


@dataclass(frozen=True, slots=True)
class Items:
    """Items bounds the number of items of a list or table."""

    least: int
    most: int

    def admits(self, value: object) -> bool:
        """Return whether a list or table has so many items."""
        return isinstance(value, Sized) and self.least <= len(value) <= self.most

    @property
    def need(self) -> str:
        """Describe the number for a message."""
        return f"{self.least}..{self.most} items"


Bound = Range | Text | MemorySize | Items

Seed: TypeAlias = Annotated[int, Range(0, 2**64 - 1)]
"""A seed that NumPy, PyTorch and the hash of an utterance all take."""

AUTO = "auto"
"""The devices that a host has: its GPUs, or else its cores."""

Device: TypeAlias = Annotated[str, Text(3, 20, r"(cpu|cuda(:\d{1,3})?)(#\d{1,4})?", "cuda:0")]
Devices: TypeAlias = Annotated[tuple[Device, ...], Items(1, 1024)] | Literal["auto"]


def check_ranges(record: object) -> None:
    """Raise ValueError, which names value and range, for a field outside its declared range."""
    for name, hint in declared(cast(Any, type(record))).items():
        _check(hint, getattr(record, name), name)


@cache
def declared(cls: Any) -> Mapping[str, Any]:  # noqa: ANN401 - a dataclass
    """Return the annotations of a dataclass's fields, with the ranges in them."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {each.name: hints[each.name] for each in fields(cls) if each.init}


def bounds_of(hint: Any) -> tuple[Any, tuple[Bound, ...]]:  # noqa: ANN401
    """Return an annotation's plain type, and the bounds declared with it."""
    if typing.get_origin(hint) is not Annotated:
        return hint, ()
    plain, *extras = typing.get_args(hint)
    return plain, tuple(each for each in extras if isinstance(each, Bound))


def is_of(hint: Any, value: object) -> bool:  # noqa: ANN401
    """Return whether a value has an annotation's type; a list, as TOML holds it, is a tuple's."""
    plain, _ = bounds_of(hint)
    kind = typing.get_origin(plain) or plain
    if kind is typing.Literal:
        return value in typing.get_args(plain)
    return type(value) is kind or (kind is tuple and isinstance(value, list))


def _check(hint: Any, value: object, where: str) -> None:  # noqa: ANN401
    plain, bounds = bounds_of(hint)
    for bound in bounds:
        whole = plain is not int or isinstance(value, Integral)
        if not (whole and bound.admits(value)):
            raise ValueError(f"{where} = {shown(value)}: need {bound.need}")
    for part, item, place in _parts(plain, value):
        _check(part, item, f"{where}{place}")


def _parts(plain: Any, value: object) -> Iterator[tuple[Any, object, str]]:  # noqa: ANN401
    """Yield the annotation, the value and the place of each part of a list, table or option."""
    origin, arguments = typing.get_origin(plain), typing.get_args(plain)
    if origin is tuple and isinstance(value, tuple):
        yield from ((arguments[0], item, f"[{index}]") for index, item in enumerate(value))
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            yield arguments[0], key, ": key"
            yield arguments[1], item, f".{printable(str(key))}"
    elif origin in (types.UnionType, typing.Union) and value is not None:
        members = [member for member in arguments if member is not types.NoneType]
        if len(members) > 1:  # the one of the value's type; a record has checked itself
            members = [each for each in members if is_of(each, value)]
        yield from ((member, value, "") for member in members)


def mebibytes(size: str) -> int:
    """Return the mebibytes of a size such as "4g"; ValueError for other text."""
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f'size = {shown(size)}: need a size such as "4g"')
    return int(match[1]) * _MEBIBYTES[match[2]]


def shown(value: object) -> str:
    """Return a value as messages show it: one short line, without a password."""
    try:
        return printable(_SHORT.repr(value))
    except (ValueError, RecursionError):  # thousands of digits, or of brackets
        return f"a {type(value).__name__} too large to show"


def holds_password(text: str) -> bool:
    """Return whether a text holds a URI with a user's password or a signature in it."""
    return _PASSWORD.search(text) is not None or _SIGNATURE.search(text) is not None


def printable(text: str, most: int = 200) -> str:
    """Return text on one line of at most `most` characters, without a password."""
    line = _CONTROL.sub(lambda found: repr(found[0])[1:-1], without_secrets(text))
    return line if len(line) <= most else f"{line[:most]}..."


def without_secrets(text: str) -> str:
    """Return text with stars for what URIs in it hold of passwords, tokens and signatures."""
    return _SIGNATURE.sub(r"\1***", _PASSWORD.sub("***@", text))


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"
