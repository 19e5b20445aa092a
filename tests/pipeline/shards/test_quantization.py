import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.shards.features import dequantize, quantize


def drawn(num_frames: int, centre: float, spread: float, seed: int) -> np.ndarray:
    """Features of 64 bins, each with a centre of its own."""
    generator = np.random.default_rng(seed)
    centres = centre * generator.standard_normal(64)
    values = centres + spread * generator.standard_normal((num_frames, 64))
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
