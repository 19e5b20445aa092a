"""The compiled causal mean and moments have the bits of NumPy's, on any CPU."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.compiled_library import declared
from pipeline.filterbank import NUM_BINS
from pipeline.normalization import CausalMean, Moments, causal_mean

SOURCE = Path(causal_mean.__file__).with_name("frame_sums.c")
SCALES = [0.0, 1e-9, 1e-6, 1e-3, 1.0, 30.0, 1e4, 1e6]
needs_compiler = pytest.mark.skipif(causal_mean._C is None, reason="there was no C compiler")


def energies(num_frames: int, scale: float, seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (scale * generator.standard_normal((num_frames, NUM_BINS))).astype(np.float32)


def test_the_loops_are_compiled_where_there_is_a_compiler() -> None:
    """An error in the C file fails here."""
    assert causal_mean._C is not None or shutil.which("cc") is None


@needs_compiler
@settings(max_examples=40)
@given(st.integers(0, 600), st.integers(0, 600), st.sampled_from(SCALES), st.integers(0, 1000))
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_causal_means_have_the_same_bits(
    num_frames: int, cut: int, scale: float, seed: int
) -> None:
    """Cut anywhere, from numbers below float16's to those beyond; sums and counts too."""
    stream = energies(num_frames, scale, seed)
    mean, by_numpy = CausalMean(), CausalMean()
    for part in (stream[:cut], stream[cut:]):
        expected = by_numpy.subtract_by_numpy(part, np.float16)
        assert mean.subtract(part, np.float16).tobytes() == expected.tobytes()
    assert (mean.count, mean.sum.tobytes()) == (by_numpy.count, by_numpy.sum.tobytes())


def test_numbers_of_other_types_have_their_values() -> None:
    """The compiled loop reads float32 alone, of as many bins as its mean has."""
    stream = energies(20, 1.0, 3).astype(np.float16)
    expected = CausalMean().subtract_by_numpy(stream.astype(np.float32), np.float16)
    for dtype in (np.float16, np.float64):
        found = CausalMean().subtract(stream.astype(dtype), np.float16)
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match=r"\(80,\) bins: need \(64,\)"):
        CausalMean().subtract(np.ones((5, 80), np.float32), np.float16)


@needs_compiler
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_every_float16_is_rounded_to_as_numpy_rounds() -> None:
    """All finite float16, the middles between neighbours, and what lies on either side of them."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = (halves[:-1] + halves[1:]) / 2
    around = [np.nextafter(middles, np.float32(to)) for to in (0, np.inf)]
    values = np.concatenate([halves, middles, *around, [65519.0, 65520.0, 1e6]])
    values = np.concatenate([values, -values]).astype(np.float32)
    for row in np.resize(values, (-(-len(values) // NUM_BINS), NUM_BINS)):
        # After -v and v the mean is 0, which v loses.
        found = CausalMean().subtract(np.stack([-row, row]), np.float16)[1]
        assert found.tobytes() == row.astype(np.float16).tobytes()


@needs_compiler
@settings(max_examples=40)
@given(st.integers(0, 600), st.sampled_from(SCALES[:-1]), st.integers(0, 1000))
def test_moments_have_the_same_bits(num_frames: int, scale: float, seed: int) -> None:
    """Of frames of float16, subnormal ones and zeros of both signs among them."""
    frames = energies(num_frames, scale, seed).astype(np.float16)
    found, expected = Moments.of(frames), Moments.by_numpy(frames)
    assert found.count == expected.count
    assert found.sum.tobytes() == expected.sum.tobytes()
    assert found.sum_of_squares.tobytes() == expected.sum_of_squares.tobytes()


@needs_compiler
@pytest.mark.parametrize("options", ["-O0", "-O3 -march=x86-64", "-O3 -march=x86-64-v3"])
def test_any_cpu_has_the_same_bits(
    options: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Builds for other vectors, and for none, compute what the installed one does."""
    stream = energies(500, 5.0, 1)
    expected = CausalMean().subtract(stream, np.float16)
    library = tmp_path / "frame_sums.so"
    flags = [*options.split(), "-ffp-contract=off", "-DFOR_EACH_CPU=", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, str(SOURCE), "-o", str(library)], check=True)
    monkeypatch.setattr(
        causal_mean, "_C", declared(ctypes.CDLL(str(library)), causal_mean.FUNCTIONS)
    )
    assert CausalMean().subtract(stream, np.float16).tobytes() == expected.tobytes()
    moments = Moments.by_numpy(expected)
    assert Moments.of(expected).sum_of_squares.tobytes() == moments.sum_of_squares.tobytes()
