"""Read TOML tables into frozen records: check types, refuse unknown keys, keep digests stable."""

import difflib
import hashlib
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import MISSING, Field, asdict, fields, is_dataclass
from enum import StrEnum
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

Record = TypeVar("Record")

TAG = "name"
"""The key by which a table says which dataclass of a union it is."""


class ConfigurationError(ValueError):
    """ConfigurationError names the file and the key that cannot be used, and a remedy."""


def read_toml(path: str | Traversable) -> dict[str, object]:
    """Read a TOML file by its path, or one that is packed with the code.

    Raises ConfigurationError if the file is absent or malformed.
    """
    file = Path(path) if isinstance(path, str) else path
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: not TOML: {error}") from error


def apply_overrides(table: Mapping[str, object], overrides: Sequence[str]) -> dict[str, object]:
    """Copy `table` and apply settings such as `section.key=value`; later ones win.

    A value that is not TOML is plain text. Raises ConfigurationError for a setting without a key
    or an equals sign, and for one inside a key that is no section.
    """
    result = deepcopy(dict(table))
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            raise ConfigurationError(f"--set {override}: need section.key=value")
        _section(result, keys[:-1], override)[keys[-1]] = _override_value(text.strip())
    return result


def _section(table: dict[str, object], keys: Sequence[str], override: str) -> dict[str, object]:
    for key in keys:
        inner = table.setdefault(key, {})
        if not isinstance(inner, dict):
            raise ConfigurationError(f"--set {override}: {key} = {inner!r} is no section")
        table = inner
    return table


def _override_value(text: str) -> object:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = parsed["value"]
    # A date is meant as text, and so is text that contains further TOML lines.
    usable = len(parsed) == 1 and isinstance(value, bool | int | float | str | list | dict)
    return value if usable else text


def read_record(cls: type[Record], table: Mapping[str, object], where: str) -> Record:
    """Read `table` into the dataclass `cls`; `where` names the file in messages.

    Fields may be int, float, str, bool, Literal, StrEnum, dataclasses, tuple[T, ...],
    dict[str, T], `T | None`, and unions of dataclasses, chosen by a table's `name`.
    Raises ConfigurationError for unknown keys, missing keys and wrong types, and in place of a
    ValueError from the record's own check.
    """
    known = {field.name: field for field in fields(typing.cast(Any, cls)) if field.init}
    _refuse_unknown(table, list(known), where)
    hints = typing.get_type_hints(cls)
    values = {}
    for name, field in known.items():
        if name in table:
            values[name] = _convert(hints[name], table[name], f"{where}: {name}")
        elif _is_required(field):
            raise ConfigurationError(f"{where}: {name} is missing: need {_describe(hints[name])}")
    try:
        return cls(**values)
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _refuse_unknown(table: Mapping[str, object], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            remedy = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known)}"
            raise ConfigurationError(f"{where}: unknown key {key}: {remedy}")


def _is_required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _convert(hint: Any, value: object, where: str) -> object:  # noqa: ANN401
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        one, *others = _members(hint)
        return _read_tagged([one, *others], value, where) if others else _convert(one, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _convert(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if is_dataclass(hint) and isinstance(hint, type) and isinstance(value, dict):
        return read_record(hint, value, where)
    if origin is typing.Literal and (type(value), value) in [(type(c), c) for c in arguments]:
        return value
    if isinstance(hint, type):
        return _convert_plain(hint, value, where)
    raise _wrong_type(hint, value, where)


def _members(union: Any) -> list[Any]:  # noqa: ANN401
    return [member for member in typing.get_args(union) if member is not types.NoneType]


def _read_tagged(members: Sequence[Any], value: object, where: str) -> object:
    """Read a table into the dataclass of a union whose field `name: Literal["..."]` it names."""
    tagged = {typing.get_args(typing.get_type_hints(each)[TAG])[0]: each for each in members}
    need = "one of " + ", ".join(map(repr, tagged))
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where} = {value!r}: need a table")
    if TAG not in value:
        raise ConfigurationError(f"{where}: {TAG} is missing: need {need}")
    name = value[TAG]
    if not (isinstance(name, str) and name in tagged):
        raise ConfigurationError(f"{where}: {TAG} = {name!r}: need {need}")
    return read_record(tagged[name], value, where)


def _convert_plain(hint: type, value: object, where: str) -> object:
    if issubclass(hint, StrEnum) and value in [str(member) for member in hint]:
        return hint(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and is_number and math.isfinite(typing.cast(float, value)):
        return float(typing.cast(float, value))  # 1 and 1.0 have one digest
    if hint in (int, str, bool) and type(value) is hint:
        return value
    raise _wrong_type(hint, value, where)


def _wrong_type(hint: Any, value: object, where: str) -> ConfigurationError:  # noqa: ANN401
    return ConfigurationError(f"{where} = {value!r}: need {_describe(hint)}")


def _describe(hint: Any) -> str:  # noqa: ANN401
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return _describe(_members(hint)[0])
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


def canonical_json(record: object) -> str:
    """Write the record as JSON with sorted keys, so that equal records give equal text."""
    plain = asdict(typing.cast(Any, record))
    return json.dumps(plain, sort_keys=True, ensure_ascii=False, allow_nan=False)


def digest(record: object) -> str:
    """Return the SHA-256 of the record's canonical JSON, in hexadecimal."""
    return hashlib.sha256(canonical_json(record).encode()).hexdigest()
