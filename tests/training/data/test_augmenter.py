"""The augmentation of a recipe: its bounds, its default that changes nothing, and short rows."""

from hashlib import sha256

import numpy as np
import pytest

from tests.training.data.partition_rows import row
from training.data.augmentation import Augmenter
from training.settings.model_training import AugmentationConfig


def test_the_default_changes_nothing() -> None:
    """One speed, which is that of the recording, and no mask."""
    config = AugmentationConfig()
    assert config == AugmentationConfig((1.0,), 0, 10, 0, 20, 0.2)
    assert not config.changes_speed
    assert AugmentationConfig(speed=(1.0, 0.9)).changes_speed
    rows = [row(1, 30, soft=False)]
    assert Augmenter(config, 1, 2).at_speed(rows) is rows


def test_the_mean_stretch_is_that_of_the_speeds() -> None:
    """Half the speed takes twice the time: 1.5 times on average with the speed as it is."""
    assert AugmentationConfig(speed=(0.5, 1.0)).mean_stretch == 1.5
    assert AugmentationConfig(speed=(2.0,)).mean_stretch == 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": (0.49,)}, "0.49: need 0.5"),
        ({"speed": (2.01,)}, "2.01: need 0.5"),
        ({"time_masks": 21}, "21: need 0..20"),
        ({"frequency_masks": -1}, "-1: need 0..20"),
    ],
)
def test_bounds(change: dict, message: str) -> None:
    """Speeds of a half and of two are allowed, and twenty masks; what is beyond is named."""
    AugmentationConfig(speed=(0.5, 2.0), time_masks=20, frequency_masks=20)
    with pytest.raises(ValueError, match=message):
        AugmentationConfig(**change)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize(("num_frames", "expected"), [(4, 4), (5, 9), (6, 11)])
def test_rows_of_less_than_five_frames_keep_their_speed(
    soft: bool, num_frames: int, expected: int
) -> None:
    """They have no low-rate frame at some offset; five frames at half the speed are nine."""
    given = row(1, num_frames, soft)
    augmenter = Augmenter(AugmentationConfig(speed=(0.5,)), 1, 2)
    (found,) = augmenter.at_speed([given])
    assert len(found.features) == expected
    assert (found is given) == (num_frames == 4)
    counted = augmenter.num_frames([given.utterance_id], np.array([num_frames]))
    assert counted.tolist() == [expected]


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
    frames = np.ones((found.sum(), 64), np.float16)
    augmenter.mask(frames, names, np.cumsum(found) - found, found)
    assert sha256(np.packbits(frames == 0).tobytes()).hexdigest()[:16] == masked
