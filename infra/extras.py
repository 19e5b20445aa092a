"""Megahour's extras: what an installation has of them, and how to add what it lacks.

`pyproject.toml` lists each one's packages.
"""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Literal, TypeAlias

Extra: TypeAlias = Literal["spark", "train", "demo", "deploy"]

_KNOWN_BY: Mapping[Extra, str] = {
    "spark": "pyspark",
    "train": "torch",
    "demo": "pyroomacoustics",
    "deploy": "onnxruntime",
}
"""The module by which an extra is known to be installed."""


def lacking(extras: Iterable[Extra]) -> list[Extra]:
    """Return those of some extras that are not installed."""
    return [each for each in dict.fromkeys(extras) if find_spec(_KNOWN_BY[each]) is None]


def how_to_install(extras: Iterable[Extra]) -> str:
    """Return the command that installs some extras."""
    return f"pip install 'megahour[{','.join(extras)}]'"
