import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.audio.decode import (
    AudioError,
    duration_tolerance,
    is_rounded_from,
    max_file_bytes,
    require_duration,
)

OPUS, MP3 = 1_600, 2_304


def passes(num_samples: int, declared_s: float, padding: int = 0) -> bool:
    try:
        require_duration(np.zeros(num_samples, np.float32), declared_s, padding)
    except AudioError:
        return False
    return True


@pytest.mark.parametrize(
    ("declared_s", "padding", "missing_s", "surplus_s"),
    [
        (2.7, 0, 0.27, 0.27),  # 10 %
        (2.731, 0, 0.2731, 0.2731),
        (20.5, 0, 1.0, 1.0),  # 1 s
        (3600.0, 0, 1.0, 1.0),
        (3.0, 0, 0.5, 1.0),  # whole seconds, rounded or cut
        (0.3, 0, 0.05, 0.1),  # tenths
        (0.08, 0, 0.008, 0.01),  # hundredths
        (1.0, 0, 0.25, 0.95),  # a quarter and 95 % at most
        (2.7, OPUS, 0.37, 0.37),
        (2.7, MP3, 0.414, 0.414),
        (0.4, MP3, 0.1, 0.244),
    ],
)
def test_the_tolerance_is_precision_share_and_padding(
    declared_s: float, padding: int, missing_s: float, surplus_s: float
) -> None:
    """A sample within either bound passes, and a sample beyond does not."""
    assert duration_tolerance(declared_s, padding) == pytest.approx((missing_s, surplus_s))
    shortest = math.ceil((declared_s - missing_s) * 16_000 - 1e-6)
    longest = math.floor((declared_s + surplus_s) * 16_000 + 1e-6)
    inner = [passes(n, declared_s, padding) for n in (shortest + 1, longest - 1)]
    outer = [passes(n, declared_s, padding) for n in (shortest - 1, longest + 1)]
    assert (inner, outer) == ([True, True], [False, False])


@given(st.integers(400, 3600 * 16_000), st.integers(0, 6), st.sampled_from([0, OPUS, MP3]))
def test_half_an_utterance_never_passes_nor_do_two(
    num_samples: int, digits: int, padding: int
) -> None:
    """However roughly its length is stated, once that is not zero."""
    declared_s = round(num_samples / 16_000, digits)
    if declared_s >= 0.001:
        half = min(num_samples / 16_000, declared_s) / 2
        assert not passes(math.floor(half * 16_000), declared_s, padding)
        assert not passes(math.ceil(declared_s * 32_000), declared_s, padding)


@given(st.integers(2_000, 3600 * 16_000), st.integers(0, 6))
def test_a_whole_utterance_passes_as_rounded_or_cut(num_samples: int, digits: int) -> None:
    """By any number of digits whose last one does not make up half the number."""
    seconds, unit_s = num_samples / 16_000, 10.0**-digits
    if seconds >= 2 * unit_s:
        for declared_s in (round(seconds, digits), math.floor(seconds / unit_s) * unit_s):
            assert passes(num_samples, round(declared_s, digits))
            assert is_rounded_from(round(declared_s, digits), num_samples)


def test_other_lengths_are_doubtful() -> None:
    """Ten milliseconds more are not what 2.731 was rounded from, but may be what 2.7 was."""
    assert is_rounded_from(2.731, 43_700)
    assert not is_rounded_from(2.731, 43_860)
    assert is_rounded_from(2.7, 43_860)
    assert not is_rounded_from(2.7, 42_000)


def test_a_mismatch_names_length_and_bounds() -> None:
    """The ledger's detail says what was found and what would do."""
    with pytest.raises(AudioError, match=r"1.350 s of audio, declared 2.700 s: need 2.430 to 2.97"):
        require_duration(np.zeros(21_600, np.float32), 2.7, 0)


@pytest.mark.parametrize("declared_s", [0.001, 0.3, 1.0, 2.7, 3599.0])
def test_no_file_that_could_pass_is_too_large(declared_s: float) -> None:
    """The largest one is a WAV of doubles, as long as may be, with 16 MiB of other content."""
    _, surplus_s = duration_tolerance(declared_s, MP3)
    assert max_file_bytes(declared_s) >= 2**24 + (declared_s + surplus_s) * 16_000 * 8
    assert max_file_bytes(declared_s) < 2**24 + (declared_s * 1.5 + 1.2) * 16_000 * 8
