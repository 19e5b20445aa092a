"""The augmentation of a recipe: SpecAugment's masks, and speed perturbation on features."""

from hashlib import sha256, shake_128

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.signal import resample_poly

from pipeline.filterbank import NUM_BINS, STACK
from pipeline.filterbank.log_mel import log_mel_energies
from pipeline.kbest import KBest
from pipeline.splicing import num_low_rate_frames
from training.data.augmentation import (
    Augmenter,
    alignment_at_speed,
    features_at_speed,
    kbest_at_speed,
    num_frames_at_speed,
    positions_at_speed,
)
from training.settings.model_training import AugmentationConfig


@pytest.mark.parametrize(
    ("sub_epoch", "counts", "masked"),
    [
        (0, [101, 112, 91, 91], "ccd757c5e88d528a"),
        (1, [101, 101, 112, 101], "785c319334bc5c1c"),
        (70_000, [91, 101, 101, 112], "714870e3700b4899"),
    ],
)
def test_a_seed_draws_these_speeds_and_masks(
    sub_epoch: int, counts: list[int], masked: str
) -> None:
    """A model that is trained again, or on, by another version hears what it heard before."""
    config = AugmentationConfig(
        speed=(0.9, 1.0, 1.1), frequency_masks=2, time_masks=2, time_mask_share=0.5
    )
    augmenter, names = Augmenter(config, 2**64 - 17, sub_epoch), ["a", "u-1", "sé", "s_0-DP5"]
    found = augmenter.num_frames(names, np.full(len(names), 101))
    assert found.tolist() == counts
    frames = np.ones((found.sum(), NUM_BINS), np.float16)
    augmenter.mask(frames, names, np.cumsum(found) - found, found)
    assert sha256(np.packbits(frames == 0).tobytes()).hexdigest()[:16] == masked


# Built into a config within the tests: beartype looks at random items of a config's tuple, and
# Hypothesis warns where a strategy draws from `random`.
SETTINGS = st.fixed_dictionaries(
    {
        "frequency_masks": st.integers(0, 4),
        "frequency_mask_bins": st.integers(1, NUM_BINS),
        "time_masks": st.integers(0, 4),
        "time_mask_frames": st.integers(1, 80),
        "time_mask_share": st.floats(0.01, 1),
    }
)
LENGTHS = st.lists(st.integers(0, 60), min_size=1, max_size=6)
SEEDS = st.integers(0, 2**64 - 1)


def masked(config: AugmentationConfig, seed: int, sub_epoch: int, lengths: list[int]) -> np.ndarray:
    """Mask frames of ones; one frame lies before, between and after the utterances."""
    counts = np.array(lengths)
    firsts = np.cumsum(counts + 1) - counts
    frames = np.ones((counts.sum() + len(counts) + 1, NUM_BINS), np.float16)
    names = [f"utterance-{number}" for number in range(len(lengths))]
    Augmenter(config, seed, sub_epoch).mask(frames, names, firsts, counts)
    return frames


def reference(
    config: AugmentationConfig, seed: int, sub_epoch: int, lengths: list[int]
) -> np.ndarray:
    """The same masks, one integer of the hash after the other, cell by cell."""
    frames = np.ones((sum(lengths) + len(lengths) + 1, NUM_BINS), np.float16)
    first = 1
    for number, length in enumerate(lengths):
        key = seed.to_bytes(8, "little") + sub_epoch.to_bytes(8, "little")
        stream = shake_128(key + f"utterance-{number}".encode()).digest(1000)
        words = iter([int.from_bytes(stream[at : at + 8], "little") for at in range(8, 1000, 8)])
        left = int(config.time_mask_share * length)
        for _ in range(config.time_masks):
            width = next(words) % (min(left, config.time_mask_frames) + 1)
            start = next(words) % (length - width + 1)
            left -= width
            for frame in range(start, start + width):
                for each in range(NUM_BINS):
                    frames[first + frame, each] = 0
        left = NUM_BINS
        for _ in range(config.frequency_masks):
            width = next(words) % (min(left, config.frequency_mask_bins) + 1)
            start = next(words) % (NUM_BINS - width + 1)
            left -= width
            for frame in range(length):
                frames[first + frame, start : start + width] = 0
        first += length + 1
    return frames


@settings(max_examples=60, deadline=None)
@given(SETTINGS, SEEDS, st.integers(0, 1000), LENGTHS)
def test_masks_are_those_of_the_reference(masks, seed, sub_epoch, lengths) -> None:
    """Widths and places are words of SHAKE-128 of seed, sub-epoch and id, and nothing else is."""
    config = AugmentationConfig(**masks)
    expected = reference(config, seed, sub_epoch, lengths)
    assert np.array_equal(masked(config, seed, sub_epoch, lengths), expected)


SPEEDS = st.floats(0.5, 2)


def count(num_frames: int, speed: float) -> int:
    return int(num_frames_at_speed(np.array([num_frames]), np.array([speed]))[0])


@settings(deadline=None)
@given(st.integers(0, 400), SPEEDS)
def test_as_many_frames_as_fit(num_frames: int, speed: float) -> None:
    """One frame more would lie beyond the last stored one; five frames are kept for splicing."""
    found = count(num_frames, speed)
    if speed == 1 or num_frames < 5:
        assert found == num_frames
    elif found > 5:
        assert (found - 1) * speed <= num_frames - 1 + 1e-9 < found * speed + 2e-9
    else:
        assert found == 5
    if num_frames >= 5:
        assert all(num_low_rate_frames(found, offset) >= 1 for offset in range(STACK))
        assert len(positions_at_speed(num_frames, speed)) == found


@pytest.mark.parametrize(
    ("num_frames", "speed", "expected"),
    [
        (101, 0.5, 201),
        (101, 2.0, 51),
        (101, 1.1, 91),
        (101, 0.9, 112),
        (5, 1.1, 5),
        (5, 0.5, 9),
        (4, 0.5, 4),
    ],
)
def test_counts_by_hand(num_frames: int, speed: float, expected: int) -> None:
    """100 shifts of 10 ms at speed 1.1 are 90.9 shifts, and those have 91 frames."""
    assert count(num_frames, speed) == expected


@settings(max_examples=40, deadline=None)
@given(st.integers(5, 60), st.sampled_from([0.5, 0.9, 1.0, 1.1, 1.37, 2.0]), st.integers(0, 99))
def test_features_are_interpolated_in_time_and_in_mel(num_frames, speed, seed) -> None:
    """As NumPy interpolates in float64, one bin and one frame after the other."""
    features = np.random.default_rng(seed).normal(size=(num_frames, NUM_BINS)).astype(np.float16)
    positions = np.minimum(np.arange(count(num_frames, speed)) * speed, num_frames - 1)
    in_time = np.stack(
        [np.interp(positions, np.arange(num_frames), column) for column in features.T], axis=1
    )
    # Kaldi's mel scale, 20 to 8000 Hz; the bins' centres divide it evenly.
    low, high = (1127 * np.log(1 + hertz / 700) for hertz in (20, 8000))
    centres = low + (high - low) * np.arange(1, NUM_BINS + 1) / (NUM_BINS + 1)
    heard_at = 1127 * np.log(1 + (np.exp(centres / 1127) - 1) / speed)
    expected = np.stack([np.interp(heard_at, centres, frame) for frame in in_time])
    assert np.abs(features_at_speed(features, speed) - expected).max() < 4e-3


@pytest.mark.parametrize("speed", [0.9, 1.1])
def test_a_tone_rises_as_it_does_in_resampled_audio(speed: float) -> None:
    """Three tones: log-mel at another speed is nearer to resampled audio's than time alone."""
    up, down = {0.9: (10, 9), 1.1: (10, 11)}[speed]
    seconds = np.arange(16_000) / 16_000
    tones = sum(np.sin(2 * np.pi * hertz * seconds) for hertz in (300, 1100, 2900))
    noise = np.random.default_rng(0).normal(size=16_000)
    audio = (0.1 * tones * (1 + np.sin(20 * seconds)) + 1e-3 * noise).astype(np.float32)
    stored = log_mel_energies(audio).astype(np.float16)
    heard = log_mel_energies(resample_poly(audio, up, down).astype(np.float32))
    made = features_at_speed(stored, speed)
    in_time = stored[np.rint(positions_at_speed(len(stored), speed)).astype(int)]
    frames = slice(0, min(len(heard), len(made)))
    # The highest octave of slower audio is empty, and is repeated here.
    bins = slice(0, 56)
    far, near = (
        np.square(each[frames, bins] - heard[frames, bins]).mean() for each in (in_time, made)
    )
    assert abs(len(heard) - len(made)) <= 1
    assert near < 0.3 * far


@pytest.mark.parametrize(
    ("speed", "expected"),
    [
        (0.9, "39b84eeca38734a8346a1d6a6b403b972d59c965cc4b955c51f633c5d4ec5b56"),
        (1.1, "3cab77f1c8add0ab46c8a2b4993690568ece19fa1f2ef6d50b3937cb1c159999"),
    ],
)
def test_features_have_these_bits(speed: float, expected: str) -> None:
    """Another interpolation, order of sums or type makes other features, and so other models."""
    # The bins' logarithms have other last bits on other processors, 1e-14 of a bin; no weight here
    # is within 4e-11 of where its rounding to float32 changes. All else is exact by IEEE 754.
    cells = np.arange(90 * NUM_BINS).reshape(90, NUM_BINS)
    stored = ((cells * 7919 % 4093 - 2046) / 256).astype(np.float16)
    made = features_at_speed(stored, speed)
    assert sha256(made.tobytes()).hexdigest() == expected


@settings(deadline=None)
@given(st.integers(5, 60), SPEEDS)
def test_labels_are_those_of_the_nearest_frame(num_frames: int, speed: float) -> None:
    """An alignment is as long as its features, and no label moves by more than 5 ms."""
    senones = np.arange(num_frames, dtype=np.uint16)
    found = alignment_at_speed(senones, speed)
    positions = np.minimum(np.arange(len(found)) * speed, num_frames - 1)
    assert len(found) == count(num_frames, speed)
    assert np.abs(found - positions).max() <= 0.5


@settings(deadline=None)
@given(st.integers(5, 60), SPEEDS, st.integers(0, 2))
def test_soft_targets_are_those_of_the_nearest_low_rate_frame(num_frames, speed, offset) -> None:
    """Target t is of the middle frame offset + 3t + 1; the one taken is within 15 ms of it."""
    stored = num_low_rate_frames(num_frames, offset)
    middles = offset + 1 + STACK * np.arange(stored)
    targets = KBest(
        np.stack([middles, middles + 1], axis=1).astype(np.uint16),
        np.stack([np.zeros(stored), -middles], axis=1).astype(np.float16),
        middles.astype(np.float16),
        tail_samples=1,
    )
    found = kbest_at_speed(targets, num_frames, offset, speed)
    wanted = positions_at_speed(num_frames, speed)[offset + 1 :: STACK]
    wanted = wanted[: num_low_rate_frames(count(num_frames, speed), offset)]
    assert len(found.log_z) == len(wanted)
    nearest = np.abs(middles[:, np.newaxis] - wanted).min(axis=0)
    assert np.allclose(np.abs(found.senones[:, 0] - wanted), nearest)
    assert np.array_equal(found.log_z, found.senones[:, 0])
    assert np.array_equal(found.logits[:, 1], -found.log_z)
    assert found.tail_samples == 1
