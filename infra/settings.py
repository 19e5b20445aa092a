"""Declare which values a record's fields may have, and read records from TOML.

`num_kept: Annotated[int, Range(1, 1000)]` declares a range. With `__post_init__ = check_ranges` a
record refuses other values, of choices and records too, whether code makes it or `read_record`
reads it. `read_record` also checks types and refuses unknown keys, and ConfigurationError names the
file, the key and a remedy. Records can be printed as canonical JSON, whose digest identifies the
settings of a step.
"""

import difflib
import hashlib
import json
import math
import os
import re
import reprlib
import stat
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence, Sized
from copy import deepcopy
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Protocol, TypeAlias, TypeVar, cast, runtime_checkable

# A password may hold slashes; a user alone may be a token.
_PASSWORD = re.compile(r"(?<=://)(?:[^/\s:@]*:\S*|[^/\s@]*)@")
_SIGNATURE = re.compile(
    # Of bounded names, as the time of others grows with the square of the text.
    r"([?&][^\s=&?]{0,64}(?:credential|secret|signature|token)[^\s=&?]{0,64}=)[^\s&]+",
    re.IGNORECASE,
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


def _check(hint: Any, value: object, where: str) -> None:  # noqa: ANN401
    plain, bounds = bounds_of(hint)
    for bound in bounds:
        whole = plain is not int or isinstance(value, Integral)
        if not (whole and bound.admits(value)):
            raise ValueError(f"{where} = {shown(value)}: need {bound.need}")
    if not _is_union(plain):
        members, is_one = [plain], _is_choice(plain, value)
    else:
        members = _members(plain)
        is_none = value is None and types.NoneType in typing.get_args(plain)
        # An option is checked as its one part, below.
        is_one = is_none or len(members) == 1 or any(_fits(each, value) for each in members)
    if not is_one:
        raise ValueError(f"{where} = {shown(value)}: need {' or '.join(map(_choices, members))}")
    for part, item, place in _parts(plain, value):
        _check(part, item, f"{where}{place}")


def _is_union(plain: Any) -> bool:  # noqa: ANN401
    return typing.get_origin(plain) in (types.UnionType, typing.Union)


def _fits(hint: Any, value: object) -> bool:  # noqa: ANN401
    """Return whether a value may be of one type of a union; a whole number is a float, too."""
    plain, _ = bounds_of(hint)
    kind = typing.get_origin(plain) or plain
    if kind is typing.Literal:
        return value in typing.get_args(plain)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    wider: Any = {float: Real, int: Integral, tuple: tuple | list}.get(kind, kind)
    return not isinstance(kind, type) or isinstance(value, wider)


def _is_choice(plain: Any, value: object) -> bool:  # noqa: ANN401
    """Return whether a value is of a type of few values, or a record; True for other types."""
    if typing.get_origin(plain) is typing.Literal:
        return value in typing.get_args(plain)
    is_class = isinstance(plain, type) and (
        plain is bool or issubclass(plain, StrEnum) or is_dataclass(plain)
    )
    return not is_class or isinstance(value, plain)


def _choices(hint: Any) -> str:  # noqa: ANN401
    plain, bounds = bounds_of(hint)
    if bounds:
        return bounds[0].need
    if typing.get_origin(plain) is typing.Literal:
        return "one of " + ", ".join(map(repr, typing.get_args(plain)))
    if isinstance(plain, type) and issubclass(plain, StrEnum):
        return "one of " + ", ".join(f"{plain.__name__}.{each.name}" for each in plain)
    return "True or False" if plain is bool else f"a {getattr(plain, '__name__', plain)}"


def _parts(plain: Any, value: object) -> Iterator[tuple[Any, object, str]]:  # noqa: ANN401
    """Yield the annotation, the value and the place of each part of a list, table or option."""
    origin, arguments = typing.get_origin(plain), typing.get_args(plain)
    if origin is tuple and isinstance(value, tuple):
        yield from ((arguments[0], item, f"[{index}]") for index, item in enumerate(value))
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            yield arguments[0], key, ": key"
            yield arguments[1], item, f".{printable(str(key))}"
    elif _is_union(plain) and value is not None:
        members = _members(plain)
        if len(members) > 1:  # the one of the value's type; a record has checked itself
            members = [each for each in members if _fits(each, value)]
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


Record = TypeVar("Record")

TAG = "name"
"""The key by which a table says which dataclass of a union it is."""

MAX_FILE_BYTES = 1 << 20
"""The largest configuration that is read; the longest recipe has 5 kB."""

IMPLIED = {"implied": True}
"""Metadata of the name that a table without a name has."""

MAX_KEYS = 16  # of one override; recipes nest four deep
_DEEP_KEY = re.compile(r"(?<![\w-])(?:[\w-]+[ \t]*\.[ \t]*){64}")


class ConfigurationError(ValueError):
    """ConfigurationError names the file and the key that cannot be used, and a remedy."""


@runtime_checkable
class Readable(Protocol):
    """A Readable has the bytes of a file that lies elsewhere: packed with the code, or in S3."""

    def read_bytes(self) -> bytes:
        """Return all bytes."""


def read_toml(path: str | Readable) -> dict[str, object]:
    """Read a TOML file by its path, or one that lies elsewhere.

    Raises ConfigurationError if the file is absent or malformed.
    """
    where = printable(str(path))
    try:
        text = (read_file(path) if isinstance(path, str) else path.read_bytes()).decode()
        return _parse(text)
    except ConfigurationError:
        raise
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{where}: cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: not TOML: {_malformed(error)}") from error


def read_file(path: str) -> bytes:
    """Read a file of at most MAX_FILE_BYTES.

    Raises ConfigurationError for a larger one, an absent one, and for a device, pipe or folder.
    """
    where = printable(path)
    try:
        # Without O_NONBLOCK a pipe that nothing writes to would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                remedy = "need a file, which each step can read again"
                raise ConfigurationError(f"{where}: a folder, pipe or device: {remedy}")
            data = os.read(descriptor, MAX_FILE_BYTES + 1)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigurationError(f"{where}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigurationError(f"{where}: need at most {MAX_FILE_BYTES} bytes")
    return data


def _parse(text: str) -> dict[str, object]:
    # tomllib takes 6 s for one key of 20,000 parts, and four times that for each doubling.
    if _DEEP_KEY.search(text):
        raise RecursionError
    return tomllib.loads(text)


def _malformed(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else printable(str(error))


def apply_overrides(table: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Copy `table` and apply settings such as `section.key=value`; later ones win.

    A value that is not TOML is plain text. Raises ConfigurationError for a setting without a key
    or an equals sign, for one inside a key that is no section, and for one nested too deeply.
    """
    try:
        result = deepcopy(dict(table))
    except RecursionError as error:
        raise ConfigurationError("the recipe is nested too deeply: see jobs/recipes") from error
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = [key.strip() for key in path.split(".")]
        where = f"--set {printable(override)}"
        if not equals or not all(keys):
            raise ConfigurationError(f"{where}: need section.key=value")
        if len(keys) > MAX_KEYS:
            raise ConfigurationError(f"{where}: {len(keys)} keys: need at most {MAX_KEYS}")
        _section(result, keys[:-1], where)[keys[-1]] = _override_value(text.strip(), where)
    return result


def _section(table: dict[str, object], keys: Sequence[str], where: str) -> dict[str, object]:
    for key in keys:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(f"{where}: {key} = {shown(inner)} is no section")
        table = inner
    return table


def _override_value(text: str, where: str) -> object:
    try:
        parsed = _parse(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    except (ValueError, RecursionError) as error:  # a number of thousands of digits
        raise ConfigurationError(f"{where}: {_malformed(error)}") from error
    value = parsed["value"]
    # A date is meant as text, and so is text that contains further TOML lines.
    usable = len(parsed) == 1 and isinstance(value, bool | int | float | str | list | dict)
    return value if usable else text


def read_record(cls: type[Record], table: Mapping[str, object], where: str) -> Record:
    """Read `table` into the dataclass `cls`; `where` names the file in messages.

    Fields may be int, float, str, bool, Literal, StrEnum, dataclasses, tuple[T, ...],
    dict[str, T], `T | None`, unions of these values, and unions of dataclasses, chosen by a table's
    `name`. Each may be Annotated with its range. Raises ConfigurationError for unknown and missing
    keys, wrong types, values out of range, and in place of a ValueError from the record's check.
    """
    known = {field.name: field for field in fields(typing.cast(Any, cls)) if field.init}
    for key in table:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            remedy = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known)}"
            raise ConfigurationError(f"{where}: unknown key {printable(key)}: {remedy}")
    hints = declared(typing.cast(Any, cls))
    values = {}
    for name, field in known.items():
        if name in table:
            values[name] = _convert(hints[name], table[name], f"{where}: {name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ConfigurationError(f"{where}: {name} is missing: need {_describe(hints[name])}")
    try:
        record = cls(**values)
        check_ranges(record)
    except ValueError as error:
        if isinstance(error, ConfigurationError) and str(error).startswith(where):
            raise
        raise ConfigurationError(f"{where}: {error}") from error
    return record


def _convert(annotation: Any, value: object, where: str) -> object:  # noqa: ANN401
    hint, _ = bounds_of(annotation)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _convert_to_member(hint, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {
            key: _convert(arguments[1], item, f"{where}.{printable(key)}")
            for key, item in value.items()
        }
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return read_record(hint, value, where)
    if origin is typing.Literal and (type(value), value) in [(type(c), c) for c in arguments]:
        return value
    if isinstance(hint, type):
        return _convert_plain(hint, value, where)
    raise _wrong_type(hint, value, where)


def _convert_to_member(union: Any, value: object, where: str) -> object:  # noqa: ANN401
    members = _members(union)
    if len(members) > 1 and all(map(is_dataclass, members)):
        return _read_tagged(members, value, where)
    fitting = [each for each in members if len(members) == 1 or _fits(each, value)]
    if not fitting:
        raise _wrong_type(union, value, where)
    return _convert(fitting[0], value, where)


def _members(union: Any) -> list[Any]:  # noqa: ANN401
    return [member for member in typing.get_args(union) if member is not types.NoneType]


def _read_tagged(members: Sequence[Any], value: object, where: str) -> object:
    """Read a table into the dataclass of a union whose field `name: Literal["..."]` it names.

    A table without a name is the dataclass whose name is IMPLIED, unless it has a key of another's.
    """
    tagged = {typing.get_args(bounds_of(declared(each)[TAG])[0])[0]: each for each in members}
    need = "one of " + ", ".join(map(repr, tagged))
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where} = {shown(value)}: need a table")
    name = value.get(TAG, _unnamed(tagged, value))
    if name is None:
        raise ConfigurationError(f"{where}: {TAG} is missing: need {need}")
    if not (isinstance(name, str) and name in tagged):
        raise ConfigurationError(f"{where}: {TAG} = {shown(name)}: need {need}")
    return read_record(tagged[name], value, where)


def _unnamed(tagged: Mapping[str, Any], table: Mapping[str, object]) -> str | None:
    known = {name: {field.name: field for field in fields(cls)} for name, cls in tagged.items()}
    every = set().union(*known.values())
    meant = [name for name, its in known.items() if its[TAG].metadata == IMPLIED]
    return next((name for name in meant if not (every - known[name].keys()) & table.keys()), None)


def _convert_plain(hint: type, value: object, where: str) -> object:
    if issubclass(hint, StrEnum) and value in [str(member) for member in hint]:
        return hint(value)
    if hint is float and (number := _finite(value)) is not None:
        return number
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise _wrong_type(hint, value, where)


def _finite(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        number = float(value) + 0.0  # 1 and 1.0 have one digest, and so have 0 and -0.0
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _wrong_type(hint: Any, value: object, where: str) -> ConfigurationError:  # noqa: ANN401
    return ConfigurationError(f"{where} = {shown(value)}: need {_describe(hint)}")


def _describe(annotation: Any) -> str:  # noqa: ANN401
    hint, _ = bounds_of(annotation)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        values = [each for each in _members(hint) if not is_dataclass(each)]
        return ", or ".join(map(_describe, values)) or "a table"
    if origin is tuple:
        return f"a list, each {_describe(arguments[0])}"
    if origin is typing.Literal:
        return "one of " + ", ".join(map(repr, arguments))
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return "one of " + ", ".join(repr(str(member)) for member in hint)
    if origin is dict or is_dataclass(hint):
        return "a table"
    names = {int: "a whole number", float: "a finite number", bool: "true or false"}
    return names.get(hint, "text in quotes")


def plain(value: Any) -> Any:  # noqa: ANN401
    """Return a record as tables, lists and values, without the fields that nothing can set."""
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value) if each.init}
    if isinstance(value, Mapping):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def canonical_json(record: object) -> str:
    """Write the record as JSON with sorted keys, so that equal records give equal text."""
    return json.dumps(plain(record), sort_keys=True, ensure_ascii=False, allow_nan=False)


def digest(record: object) -> str:
    """Return the SHA-256 of the record's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(record).encode()).hexdigest()
