"""Bound the memory of every decoder that is fuzzed."""

from collections.abc import Iterator

import pytest

from tests.fuzzing.outcomes import bounded_memory


@pytest.fixture(scope="module", autouse=True)
def little_memory() -> Iterator[None]:
    """A GiB more than before the module's first test."""
    with bounded_memory():
        yield
