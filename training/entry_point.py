"""Functions of a user's own: a recipe names one, "module:function", and the settings it takes."""

import difflib
import importlib
import inspect
import keyword
import traceback
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from infra.settings import ConfigurationError, Items, Range, Text, bounds_of, printable, read_record

FactoryName: TypeAlias = Annotated[
    str, Text(3, 1000, r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "my_models:tdnn")
]
SettingName: TypeAlias = Annotated[str, Text(1, 100, r"[A-Za-z_]\w*", "num_units")]
Setting: TypeAlias = (
    Annotated[int, Range(-(2**63), 2**63 - 1)]
    | Annotated[float, Range(-1e300, 1e300)]
    | Annotated[str, Text(0, 1000)]
    | bool
)
"""An argument of a factory, as TOML holds it."""

Settings: TypeAlias = Annotated[dict[SettingName, Setting], Items(0, 100)]

HOW_TO_IMPORT = (
    "need a module that every process finds: install its package or put its folder into "
    "PYTHONPATH, on all hosts; for Spark's tasks name the package in python_dependencies of the "
    "cluster file, or add the module to --py-files"
)


@dataclass(frozen=True, slots=True)
class EntryPoint:
    """EntryPoint: the factory that a recipe names, its settings, and the arguments beside them.

    `given` names the arguments that every factory of this kind is given. All methods raise
    ConfigurationError, which names the factory and a remedy.
    """

    factory: str
    settings: Mapping[str, Setting]
    given: Sequence[str]

    def call(self, **given: object) -> Any:  # noqa: ANN401
        """Import the factory and call it; its own errors are a ConfigurationError, too."""
        assert tuple(given) == tuple(self.given), "the arguments that were declared"
        factory = self.imported()
        arguments = self.arguments(factory)
        try:
            return factory(**given, **arguments)
        except Exception as error:
            raise self.error(f"{described(error)}: correct the settings, or the factory") from error

    def imported(self) -> Callable[..., Any]:
        """Import the factory."""
        module, _, name = self.factory.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except Exception as error:
            raise self.error(f"{described(error)}: {HOW_TO_IMPORT}") from error
        if not callable(found):
            raise self.error(f"{name} is a {type(found).__name__}: need a function or a class")
        factory: Callable[..., Any] = found
        return factory

    def arguments(self, factory: Callable[..., Any]) -> dict[str, Any]:
        """Return the settings as the factory's signature wants them: names, types and ranges."""
        try:
            parameters = inspect.signature(factory).parameters
        except ValueError as error:
            raise self.error(f"{error}: need a function of Python") from error
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        taken = {name: each for name, each in parameters.items() if each.kind in by_keyword}
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        given = [*self.given, *self.settings]
        for name in given:
            if name not in taken and not takes_any:
                if name in self.given:
                    need = " and ".join(self.given)
                    raise self.error(
                        f"has no argument {name}: need one, as every factory is given {need}"
                    )
                known = [each for each in taken if each not in self.given]
                nearest = difflib.get_close_matches(name, known, n=1)
                listed = f"known: {', '.join(known) or 'none'}"
                remedy = f"did you mean {nearest[0]}?" if nearest else listed
                raise self.error(f"settings: unknown key {printable(name)}: {remedy}")
        for name, each in taken.items():
            if name not in given and each.default is inspect.Parameter.empty:
                raise self.error(f"settings: {name} is missing: the factory has no default for it")
        if named := [name for name in self.settings if keyword.iskeyword(name)]:
            raise self.error(f"settings: {named[0]} is a word of Python: need another name")
        hints = _hints(factory)
        # A setting whose annotation is not a plain type is checked by its own type.
        kept = [
            (name, hint if _is_plain(hint := hints.get(name)) else type(value))
            for name, value in self.settings.items()
        ]
        place = f"factory = {self.factory!r}: settings"
        record: Any = read_record(make_dataclass("Settings", kept), self.settings, place)
        return {name: getattr(record, name) for name in self.settings}

    def error(self, said: str) -> ConfigurationError:
        """Return an error that names the factory."""
        return ConfigurationError(f"factory = {self.factory!r}: {said}")


def require_not_given(settings: Mapping[str, Setting], given: Sequence[str]) -> None:
    """Raise ValueError if a setting has the name of an argument that every factory is given."""
    for name in given:
        if name in settings:
            raise ValueError(f"settings: {name} is given to every factory: leave it out")


def _hints(factory: Callable[..., Any]) -> Mapping[str, Any]:
    annotated = factory.__init__ if isinstance(factory, type) else factory
    try:
        return typing.get_type_hints(annotated, include_extras=True)
    except Exception:  # an annotation that only a type checker can resolve
        return {}


def _is_plain(annotation: Any) -> bool:  # noqa: ANN401
    hint, _ = bounds_of(annotation)
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        return all(each is types.NoneType or _is_plain(each) for each in typing.get_args(hint))
    is_class = isinstance(hint, type) and issubclass(hint, bool | int | float | str | StrEnum)
    return origin is Literal or is_class


def described(error: Exception) -> str:
    """Return what an error says on one line, and the place in the user's file."""
    trace = traceback.extract_tb(error.__traceback__)
    frames = [each for each in trace if "importlib" not in each.filename]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if len(frames) > 1 else ""
    return printable(f"{type(error).__name__}: {error}") + place
