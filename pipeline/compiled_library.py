"""Find a library that installation compiled from a C file, where there was a compiler."""

import ctypes
import sys
import sysconfig
from pathlib import Path

_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def compiled_library(module: str) -> ctypes.CDLL | None:
    """Load the library of a module such as "pipeline.filterbank._filter_bank"; None without one.

    On a cluster the code is in a zip, and the libraries are among the unpacked dependencies.
    """
    file = Path(*module.split(".")).with_suffix(_SUFFIX)
    places = [Path(__file__).parents[1], *map(Path, sys.path)]
    found = next((place / file for place in places if (place / file).exists()), None)
    return None if found is None else ctypes.CDLL(str(found))
