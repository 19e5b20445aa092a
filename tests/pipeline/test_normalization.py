import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.filterbank import NUM_BINS
from pipeline.normalization import CausalMean, Moments


def energies(num_frames: int, seed: int = 0) -> np.ndarray:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal((num_frames, NUM_BINS)) * 3 + 12).astype(np.float32)


def test_each_frame_loses_the_mean_up_to_and_including_it() -> None:
    """Frame t becomes x[t] - mean(x[0..t]), as NumPy's mean computes it."""
    stream = energies(50)
    expected = [stream[t] - stream[: t + 1].mean(axis=0, dtype=np.float64) for t in range(50)]
    np.testing.assert_allclose(CausalMean().subtract(stream), expected, atol=1e-6)


def test_float16_is_the_float32_result_rounded() -> None:
    """Converted block by block, frames have the bits that converting them all at once gives."""
    stream = energies(1100)
    expected = CausalMean().subtract(stream).astype(np.float16)
    assert CausalMean().subtract(stream, np.float16).tobytes() == expected.tobytes()


@settings(max_examples=20)
@given(st.integers(0, 3000), st.integers(0, 3000))
def test_blocks_are_as_invisible_as_utterances(num_frames: int, cut: int) -> None:
    """The stream is worked through in blocks of 250 frames; no cut shows where they lie."""
    stream = energies(num_frames)
    mean = CausalMean()
    pieces = [mean.subtract(stream[:cut]), mean.subtract(stream[cut:])]
    assert np.concatenate(pieces).tobytes() == CausalMean().subtract(stream).tobytes()
    sums = np.zeros(NUM_BINS)
    for frame in stream:
        sums += frame
    assert mean.sum.tobytes() == sums.tobytes()


@given(st.integers(0, 79))
def test_causal_mean_ignores_the_future(last: int) -> None:
    """Changing later frames leaves earlier frames bit-identical."""
    stream, changed = energies(80), energies(80)
    changed[last + 1 :] += 100
    before, after = CausalMean().subtract(stream), CausalMean().subtract(changed)
    assert before[: last + 1].tobytes() == after[: last + 1].tobytes()


def test_the_mean_does_not_drift_over_a_long_stream() -> None:
    """After an hour of a constant plus noise, the mean is off by less than 1e-3."""
    mean, noise = CausalMean(), energies(3600)
    for _ in range(100):
        mean.subtract(noise)
    np.testing.assert_allclose(mean.sum / mean.count, noise.mean(axis=0, dtype=np.float64), 1e-9)


def test_a_prior_counts_as_frames_of_its_mean() -> None:
    """A prior of n frames equals a stream that begins with n frames of that mean."""
    stream, prior = energies(20), np.full(NUM_BINS, 12.5)
    with_prior = CausalMean(5, 5 * prior).subtract(stream)
    long_stream = np.vstack([np.tile(prior, (5, 1)), stream]).astype(np.float32)
    assert with_prior.tobytes() == CausalMean().subtract(long_stream)[5:].tobytes()


@given(st.lists(st.integers(0, 60), max_size=5))
def test_merged_moments_are_numpys_mean_and_deviation(cuts: list[int]) -> None:
    """Moments of the pieces, merged, describe the whole."""
    frames = energies(60)
    merged = Moments.zero()
    for piece in np.split(frames, sorted(cuts)):
        merged = merged.merge(Moments.of(piece))
    assert merged.count == 60
    np.testing.assert_allclose(merged.mean, frames.mean(axis=0, dtype=np.float64))
    np.testing.assert_allclose(merged.standard_deviation, frames.std(axis=0, dtype=np.float64))


def test_a_constant_bin_has_no_deviation() -> None:
    """Rounding never makes the variance of a constant negative."""
    frames = np.tile(np.linspace(-9, 9, NUM_BINS, dtype=np.float32), (1000, 1))
    assert (Moments.of(frames).standard_deviation < 1e-5).all()


def test_moments_survive_json_to_the_bit() -> None:
    """The manifest keeps what was computed."""
    for moments in (Moments.of(energies(33)), Moments.zero()):
        loaded = Moments.from_dict(json.loads(json.dumps(moments.to_dict())))
        assert loaded.count == moments.count
        assert loaded.sum.tobytes() == moments.sum.tobytes()
        assert loaded.sum_of_squares.tobytes() == moments.sum_of_squares.tobytes()


VECTOR = [1.0] * NUM_BINS
SHAPE = rf"\({NUM_BINS},\)"
NOT_FINITE = "^moments must be finite, sums of squares not negative"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"count": -1},
            rf"count = -1, sums of shapes {SHAPE} and {SHAPE}: need count >= 0 and two",
        ),
        ({"count": None}, "^not a record of moments: TypeError"),
        ({"count": float("inf")}, "^not a record of moments: OverflowError"),
        ({"sum": [1.0]}, rf"^count = 5, sums of shapes \(1,\) and {SHAPE}: need"),
        ({"sum": [VECTOR], "sum_of_squares": [VECTOR]}, rf"shapes \(1, {NUM_BINS}\) and \(1, "),
        ({"sum": [float("nan"), *VECTOR[1:]]}, NOT_FINITE),
        ({"sum_of_squares": [float("inf"), *VECTOR[1:]]}, NOT_FINITE),
        ({"sum_of_squares": [-1.0, *VECTOR[1:]]}, NOT_FINITE),
        ({"sum_of_squares": "many"}, "^not a record of moments: ValueError.*many"),
    ],
)
def test_impossible_moments_are_refused(change: dict[str, object], message: str) -> None:
    """A damaged record is not read as statistics; the error has the value and what is needed."""
    with pytest.raises(ValueError, match=message):
        Moments.from_dict(Moments.of(energies(5)).to_dict() | change)


def test_no_frames_have_no_mean() -> None:
    """Dividing by no frames is an error, not NaN."""
    with pytest.raises(ValueError, match="count = 0: need at least 1 frame for a mean"):
        _ = Moments.zero().mean
