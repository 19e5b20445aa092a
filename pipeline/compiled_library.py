"""Find a library that installation compiled from a C file, where there was a compiler."""

import ctypes
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")

Functions = Mapping[str, tuple[Any, ...]]
"""C functions' types by name: that of the result, None for void, and those of the arguments."""


def compiled_library(module: str, functions: Functions) -> ctypes.CDLL | None:
    """Load the library of a module such as "pipeline.filterbank._filter_bank"; None without one.

    On a cluster the code is in a zip, and the libraries are among the unpacked dependencies.
    Calls of its functions release the GIL.
    """
    file = Path(*module.split(".")).with_suffix(_SUFFIX)
    places = [Path(__file__).parents[1], *map(Path, sys.path)]
    found = next((place / file for place in places if (place / file).exists()), None)
    return None if found is None else declared(ctypes.CDLL(str(found)), functions)


def declared(library: ctypes.CDLL, functions: Functions) -> ctypes.CDLL:
    """Declare the types of a library's functions; return the library."""
    for name, (result, *arguments) in functions.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library
