"""Models of a user's own: a function that the recipe names makes them, "module:function"."""

import difflib
import importlib
import inspect
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, make_dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from torch import nn

from infra.configuration import ConfigurationError, canonical_json, read_record
from infra.ranges import Items, Range, Text, bounds_of, check_ranges, printable
from pipeline.splicing import NUM_INPUTS
from training.models.acoustic_model import NetworkModel

SettingName = Annotated[str, Text(1, 100, r"[A-Za-z_]\w*", "num_units")]
Setting: TypeAlias = (
    Annotated[int, Range(-(2**63), 2**63 - 1)]
    | Annotated[float, Range(-1e300, 1e300)]
    | Annotated[str, Text(0, 1000)]
    | bool
)
"""An argument of a factory, as TOML holds it."""

GIVEN = ("num_inputs", "num_senones")
"""The arguments that every factory is given."""

HOW_TO_IMPORT = (
    "need a module that every process finds: install its package or put its folder into "
    "PYTHONPATH, on all hosts; for Spark's tasks name the package in python_dependencies of the "
    "cluster file, or add the module to --py-files"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FactoryConfig:
    """FactoryConfig: `factory(num_inputs=, num_senones=, **settings)` makes a torch module.

    `module(frames, lengths)` maps normalized frames (batch, frames, 192), and lengths on the host,
    to logits (batch, frames, senones). Logits t speak of frame t - `delay`, and depend on no frame
    more than `look_ahead` after that one; if `bidirectional`, they may depend on every frame. With
    `whole_utterances` it is not trained on chunks.
    """

    name: Literal["factory"] = "factory"
    factory: Annotated[str, Text(3, 1000, r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", "my_models:tdnn")]
    look_ahead: Annotated[int, Range(0, 1000)]
    delay: Annotated[int, Range(0, 1000)] = 0
    bidirectional: bool = False
    whole_utterances: bool = False
    settings: Annotated[dict[SettingName, Setting], Items(0, 100)] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.bidirectional and self.look_ahead:
            raise ValueError(
                f"look_ahead = {self.look_ahead}: need 0 for a bidirectional model, which sees "
                "all frames"
            )
        if self.delay > self.look_ahead:
            raise ValueError(
                f"delay = {self.delay}: need at most look_ahead = {self.look_ahead}: a model that "
                "waits longer sees more"
            )
        for name in GIVEN:
            if name in self.settings:
                raise ValueError(f"settings: {name} is given to every factory: leave it out")

    def __hash__(self) -> int:
        return hash(canonical_json(self))

    @property
    def ignores_lengths(self) -> bool:
        """Return False: nothing is known of the module."""
        return False

    def make_model(self, num_senones: int) -> NetworkModel:
        """Import the factory and let it make the module.

        ConfigurationError if it cannot be imported, does not take the settings, or fails.
        """
        factory = self._imported()
        arguments = self._arguments(factory)
        try:
            network = factory(num_inputs=NUM_INPUTS, num_senones=num_senones, **arguments)
        except Exception as error:
            raise self._error(
                f"{described(error)}: correct the settings, or the factory"
            ) from error
        if not isinstance(network, nn.Module):
            raise self._error(f"returns a {type(network).__name__}: need a torch.nn.Module")
        return NetworkModel(self, num_senones, network)

    def _imported(self) -> Callable[..., Any]:
        module, _, name = self.factory.partition(":")
        try:
            found = getattr(importlib.import_module(module), name)
        except Exception as error:
            raise self._error(f"{described(error)}: {HOW_TO_IMPORT}") from error
        if not callable(found):
            raise self._error(f"{name} is a {type(found).__name__}: need a function or a class")
        factory: Callable[..., Any] = found
        return factory

    def _arguments(self, factory: Callable[..., Any]) -> dict[str, Any]:
        """Return the settings as the factory's signature wants them: names, types and ranges."""
        try:
            parameters = inspect.signature(factory).parameters
        except ValueError as error:
            raise self._error(f"{error}: need a function of Python") from error
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        taken = {name: each for name, each in parameters.items() if each.kind in by_keyword}
        takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        given = [*GIVEN, *self.settings]
        for name in given:
            if name not in taken and not takes_any:
                raise self._error(_unknown(name, [each for each in taken if each not in GIVEN]))
        for name, each in taken.items():
            if name not in given and each.default is inspect.Parameter.empty:
                raise self._error(f"settings: {name} is missing: the factory has no default for it")
        hints = _hints(factory)
        kept = [(name, _hint(hints.get(name), value)) for name, value in self.settings.items()]
        record: Any = read_record(make_dataclass("Settings", kept), self.settings, self._place)
        return {name: getattr(record, name) for name in self.settings}

    @property
    def _place(self) -> str:
        return f"factory = {self.factory!r}: settings"

    def _error(self, said: str) -> ConfigurationError:
        return ConfigurationError(f"factory = {self.factory!r}: {said}")


def _unknown(name: str, known: list[str]) -> str:
    if name in GIVEN:
        return f"has no argument {name}: need one, as every factory is given {' and '.join(GIVEN)}"
    nearest = difflib.get_close_matches(name, known, n=1)
    remedy = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known) or 'none'}"
    return f"settings: unknown key {printable(name)}: {remedy}"


def _hints(factory: Callable[..., Any]) -> Mapping[str, Any]:
    annotated = factory.__init__ if isinstance(factory, type) else factory
    try:
        return typing.get_type_hints(annotated, include_extras=True)
    except Exception:  # an annotation that only a type checker can resolve
        return {}


def _hint(annotation: Any, value: Setting) -> Any:  # noqa: ANN401
    """Return an argument's annotation if a setting can be checked by it, or else its own type."""
    return annotation if _is_plain(annotation) else type(value)


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
