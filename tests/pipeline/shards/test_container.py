"""Packed cells hold what was packed, and features of a byte lose half a level."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.filterbank import NUM_BINS
from pipeline.shards.features import dequantize, quantize
from pipeline.shards.lattices import (
    MAX_RATIO,
    byte_planes,
    from_byte_planes,
    least_width,
    pack,
    unpack,
)


@given(st.binary(max_size=300) | st.integers(0, 5000).map(bytes))
def test_bytes_come_back(raw: bytes) -> None:
    """Any bytes, in at most one more than they are, of which a reader allows the ratio."""
    cell = pack(raw)
    assert len(cell) <= len(raw) + 1
    assert len(raw) <= MAX_RATIO * len(cell)
    assert unpack(cell, len(raw), "here") == raw
    for other in (len(raw) - 1, len(raw) + 1):
        with pytest.raises(ValueError, match="here: "):
            unpack(cell, other, "here")


@pytest.mark.parametrize(("most", "width"), [(255, 1), (256, 2), (65_535, 2), (65_536, 4)])
def test_numbers_take_the_bytes_that_their_largest_needs(most: int, width: int) -> None:
    """Up to 2^8 - 1 one, up to 2^16 - 1 two, else four; and all come back, or none of none."""
    values = np.random.default_rng(0).integers(0, most + 1, 100)
    values[7] = most
    assert least_width(values, "here") == width
    stored = values.astype(f"<u{width}")
    for some in (stored, stored[:0]):
        raw = byte_planes(some)
        assert len(raw) == some.nbytes
        assert np.array_equal(from_byte_planes(raw, stored.dtype), some)
    assert byte_planes(stored)[7] == most % 256


@pytest.mark.parametrize("value", [-1, 2**32])
def test_numbers_without_bytes_are_refused(value: int) -> None:
    """The value and the bounds are named."""
    with pytest.raises(ValueError, match=rf"here: {value}\.\.{value}: need 0\.\.4294967295"):
        least_width(np.array([value]), "here")


def test_a_cell_that_unpacks_to_too_much_is_refused() -> None:
    """A megabyte of zeros in 60 bytes is written plain, and from others not unpacked."""
    zeros = bytes(1 << 20)
    assert len(pack(zeros)) == 1 + len(zeros)
    bomb = b"\1" + pa.Codec("zstd").compress(zeros, asbytes=True)
    assert len(bomb) < 100
    with pytest.raises(ValueError, match=rf"here: {len(bomb)} packed bytes: need 1048576 in them"):
        unpack(bomb, 1 << 20, "here")


def test_cells_of_another_packing_are_refused() -> None:
    """A packing that this version does not know is not guessed."""
    for cell in (b"", b"\7a"):
        with pytest.raises(ValueError, match=r"here: .* packed bytes"):
            unpack(cell, 1, "here")


def test_damage_is_refused() -> None:
    """zstd's own error becomes a ValueError that says where."""
    cell = bytearray(pack(b"speech " * 30))
    cell[3:9] = b"\xff" * 6
    with pytest.raises(ValueError, match="here: "):
        unpack(bytes(cell), 210, "here")


def drawn(num_frames: int, centre: float, spread: float, seed: int) -> np.ndarray:
    """Features of 64 bins, each with a centre of its own."""
    generator = np.random.default_rng(seed)
    centres = centre * generator.standard_normal(NUM_BINS)
    values = centres + spread * generator.standard_normal((num_frames, NUM_BINS))
    return np.clip(values, -65_000, 65_000).astype(np.float16)


SETS = st.builds(
    drawn,
    st.integers(0, 60),
    st.sampled_from([0.0, 1.0, 10.0, 1000.0, 60_000.0]),
    st.sampled_from([0.0, 1e-7, 1e-4, 0.01, 0.3, 1.0, 5.0, 30_000.0]),
    st.integers(0, 2**32),
)


@given(SETS)
def test_storing_again_changes_nothing(features: np.ndarray) -> None:
    """From features to partitions: what was read is written, and read again, to the bit."""
    once = dequantize(*quantize(features))
    assert dequantize(*quantize(once)).tobytes() == once.tobytes()


@given(SETS)
def test_the_error_is_half_a_level(features: np.ndarray) -> None:
    """At most a 510th of the bin's range, and float16's own rounding."""
    wide = features.astype(np.float64)
    error = np.abs(dequantize(*quantize(features)) - wide)
    for column, errors in zip(wide.T, error.T, strict=True):
        if len(column):
            largest = np.abs(column).max()
            assert errors.max() <= np.ptp(column) / 510 * 1.01 + largest * 2.0**-11 + 2.0**-24


@given(SETS)
@example(drawn(3, 0.0, 1.0, 5))
def test_the_range_itself_survives(features: np.ndarray) -> None:
    """Each bin's lowest and highest value are levels."""
    stored = dequantize(*quantize(features))
    if len(features):
        assert np.array_equal(stored.min(axis=0), features.min(axis=0))
        assert np.array_equal(stored.max(axis=0), features.max(axis=0))
