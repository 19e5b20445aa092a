"""Judge what a decoder does with a changed object: an equal object, or its documented error."""

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REFUSALS = (
    *("ValueError", "ConfigurationError", "MetadataError", "AudioError"),
    "DamagedCheckpointError",
)
"""The errors that decoders document. Subclasses of ValueError such as UnicodeDecodeError are none."""

MAX_MESSAGE = 1500
MAX_CPU_S = 20.0
MEMORY_BYTES = 1 << 30

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))
"""Examples of each test; FUZZ_EXAMPLES=5000 looks longer."""

REFUSED = object()


def outcome(decode: Callable[[], Any], *named: str) -> Any:
    """Return what `decode` returns, or REFUSED if it raises a documented error, on one line.

    The message holds each of `named`. Any other error passes; it may take 20 s of CPU, where the
    slowest takes less than one.
    """
    began = time.process_time()
    try:
        return decode()
    except ValueError as error:
        message = str(error)
        assert type(error).__name__ in REFUSALS, repr(error)
        assert not isinstance(error.__cause__, MemoryError), "it asked for memory it does not have"
        assert message
        assert "\n" not in message, message
        assert len(message) <= MAX_MESSAGE, message
        assert all(name in message for name in named), (named, message)
        return REFUSED
    finally:
        assert time.process_time() - began < MAX_CPU_S


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Let the process map a GiB more than now: a larger allocation raises a MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
