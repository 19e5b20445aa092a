"""The speeds and masks that training augments utterances by."""

from dataclasses import dataclass
from typing import Annotated

from infra.ranges import Items, Range, check_ranges
from pipeline.filterbank import NUM_BINS

MaskCount = Annotated[int, Range(0, 20)]


Speed = Annotated[float, Range(0.5, 2)]


@dataclass(frozen=True, slots=True)
class AugmentationConfig:
    """AugmentationConfig: speeds, one of which each utterance takes, and SpecAugment's masks.

    `frequency_mask_bins` is F of Park et al. 2019, of 64 bins; `time_mask_frames` T, in frames of
    10 ms; `time_mask_share` p. The default changes no bit. A speed that is listed twice is drawn
    twice as often.
    """

    speed: Annotated[tuple[Speed, ...], Items(1, 16)] = (1.0,)
    frequency_masks: MaskCount = 0
    frequency_mask_bins: Annotated[int, Range(1, NUM_BINS)] = 10
    time_masks: MaskCount = 0
    time_mask_frames: Annotated[int, Range(1, 10_000)] = 20
    time_mask_share: Annotated[float, Range(1e-3, 1)] = 0.2

    __post_init__ = check_ranges

    @property
    def changes_speed(self) -> bool:
        """Return whether utterances change their lengths."""
        return any(speed != 1 for speed in self.speed)

    @property
    def mean_stretch(self) -> float:
        """Return by how much the speeds lengthen speech on average."""
        return sum(1 / speed for speed in self.speed) / len(self.speed)

    @property
    def num_masks(self) -> int:
        """Count the masks of an utterance."""
        return self.frequency_masks + self.time_masks
