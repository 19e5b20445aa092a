"""Import the packages of the `demo` extra, only to synthesize speech or simulate placements."""

from importlib import import_module
from types import ModuleType


def import_espeakng_loader() -> ModuleType:
    """Import the loader of espeak-ng's library, or raise ImportError with a remedy."""
    return _import("espeakng_loader")


def import_pyroomacoustics() -> ModuleType:
    """Import the room simulator and hold it to one thread, or raise ImportError with a remedy."""
    simulator = _import("pyroomacoustics")
    # Its threads' partial sums would make the last bits depend on the number of cores.
    simulator.constants.set("num_threads", 1)
    return simulator


def _import(name: str) -> ModuleType:
    try:
        return import_module(name)
    except ImportError as error:
        needed = "the synthetic corpus and simulated placements need it"
        raise ImportError(f"{name}: {needed}: pip install megahour[demo]") from error
