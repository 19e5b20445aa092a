"""Digests of tensors notice every small difference, at any place, of any type."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.distributed.checks import combine, digests

CPU = torch.device("cpu")


def digest(tensor: torch.Tensor) -> int:
    return int(digests([tensor], CPU))


@given(st.integers(1, 1500), st.data())
def test_one_bit_changes_the_digest(num_elements: int, data) -> None:
    """In a tensor that ends within a row or at its end, also a sign of zero."""
    generator = torch.Generator().manual_seed(num_elements)
    bits = torch.randint(-(2**31), 2**31, (num_elements,), dtype=torch.int32, generator=generator)
    changed = bits.clone()
    changed[data.draw(st.integers(0, num_elements - 1))] ^= 1 << data.draw(st.integers(0, 30))
    assert digest(bits) != digest(changed)
    assert digest(torch.zeros(3)) != digest(-torch.zeros(3))


@given(st.integers(2, 130), st.data())
def test_opposite_roundings_of_a_small_tensor_do_not_cancel(num_elements: int, data) -> None:
    """A bias of less than a row: one element a bit larger, another a bit smaller."""
    first, second = data.draw(
        st.lists(st.integers(0, num_elements - 1), min_size=2, max_size=2, unique=True)
    )
    bits = torch.ones(num_elements).view(torch.int32)
    changed = bits.clone()
    changed[first] += 1
    changed[second] -= 1
    if num_elements < 128:
        assert digest(bits) != digest(changed)


def test_size_and_order_count() -> None:
    """Zeros of other sizes differ, and so do tensors in another order."""
    assert len({digest(torch.zeros(size)) for size in range(300)}) == 300
    one, two = torch.arange(5.0), torch.arange(6.0)
    assert combine(digests([one, two], CPU)) != combine(digests([two, one], CPU))


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.float64, torch.complex64],
)
def test_any_type_and_layout(dtype: torch.dtype) -> None:
    """Transposed, a slice at an odd place, or whole: equal values have equal digests."""
    values = torch.arange(2 * 3 * 700).remainder(2).to(dtype)
    assert digest(values.view(2, -1)) == digest(values)
    assert digest(values[1:].clone()) == digest(values[1:])
    matrix = values.view(30, 140)
    assert digest(matrix.T.contiguous().T) == digest(matrix)
