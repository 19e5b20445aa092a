"""Nested functions are checked each time that they are made, by checks that are written once."""

from collections.abc import Callable
from types import FunctionType

import numpy as np
import pytest
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float32

from tests.array_checks import checked_function


def adding(offset: int) -> Callable[..., object]:
    def add(values: Float32[np.ndarray, " n"], by: int = 0) -> Float32[np.ndarray, " n"]:
        return values + np.float32(offset + by)

    assert isinstance(add, FunctionType)
    return checked_function(add)


def counting(offset: int) -> Callable[..., object]:
    def count(number: int) -> int:
        return number + offset

    assert isinstance(count, FunctionType)
    return checked_function(count)


def test_each_nested_function_is_itself_and_checked() -> None:
    """The first one, and others that are made of the same code."""
    values = np.zeros(2, np.float32)
    for offset in (1, 2, 3):
        add, count = adding(offset), counting(offset)
        np.testing.assert_array_equal(add(values, by=1), np.full(2, offset + 1))
        assert count(1) == 1 + offset
        for wrong in (values.astype(np.float64), values.reshape(1, 2), "text"):
            with pytest.raises(BeartypeCallHintViolation):
                add(wrong)
        with pytest.raises(BeartypeCallHintViolation):
            count(1.5)
