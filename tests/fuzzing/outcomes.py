"""Judge what a decoder does with a changed object: an equal object, or its documented error."""

import os
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

REFUSALS = (
    *("ValueError", "ConfigurationError", "MetadataError", "AudioError"),
    "DamagedCheckpointError",
)
"""The errors that decoders document; UnicodeDecodeError and others of Python's are none."""

MAX_MESSAGE = 1500
MAX_CPU_S = 20.0
MEMORY_BYTES = 1 << 30

IS_SEARCH = "FUZZ_EXAMPLES" in os.environ
"""A search draws other examples each time; without it, they are the same ones in every run."""


def num_examples(usual: int) -> int:
    """Return the examples of each test: `usual`; FUZZ_EXAMPLES=5000 looks longer."""
    return int(os.environ.get("FUZZ_EXAMPLES", usual))


FUZZ = settings(
    max_examples=num_examples(60),
    derandomize=not IS_SEARCH,
    suppress_health_check=list(HealthCheck),
)
"""Settings of all tests of changed bytes."""

REFUSED = object()


def outcome(decode: Callable[[], Any], *named: str) -> Any:
    """Return what `decode` returns, or REFUSED if it raises a documented error, on one line.

    The message holds each of `named`. Any other error passes; it may take 20 s of CPU, where the
    slowest takes less than one.
    """
    began, refusal = time.process_time(), None
    try:
        return decode()
    except ValueError as error:
        refusal = error
    finally:
        assert time.process_time() - began < MAX_CPU_S
    message = str(refusal)
    assert type(refusal).__name__ in REFUSALS, repr(refusal)
    assert not isinstance(refusal.__cause__, MemoryError), "it asked for more than a GiB"
    assert 0 < len(message) <= MAX_MESSAGE, message
    assert "\n" not in message, message
    assert all(name in message for name in named), (named, message)
    return REFUSED


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
