"""The augmentation of a recipe: its bounds, its default, and SpecAugment's masks."""

from hashlib import sha256, shake_128

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.filterbank import NUM_BINS
from training.data.augmentation import Augmenter
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
