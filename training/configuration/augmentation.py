"""The speeds and masks that training augments utterances by."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import numpy as np
from jaxtyping import Bool

from infra.settings import LATER, Items, Range, Text, check_ranges
from pipeline.filterbank import NUM_BINS
from pipeline.records import WITHOUT_PLACEMENT

MaskCount = Annotated[int, Range(0, 20)]


Speed = Annotated[float, Range(0.5, 2)]


Placement = Annotated[str, Text(1, 1000)]


@dataclass(frozen=True, slots=True)
class AugmentationConfig:
    """AugmentationConfig: placements, speeds, one of which each utterance takes, and masks.

    A model trains on the utterances at `placements`, such as clean and DP3; with none on all.

    SpecAugment's F (Park et al. 2019) is `frequency_mask_bins`, of 64; T is `time_mask_frames`, in
    frames of 10 ms; p is `time_mask_share`. The default changes no bit. A speed that is listed
    twice is drawn twice as often.
    """

    speed: Annotated[tuple[Speed, ...], Items(1, 16)] = (1.0,)
    frequency_masks: MaskCount = 0
    frequency_mask_bins: Annotated[int, Range(1, NUM_BINS)] = 10
    time_masks: MaskCount = 0
    time_mask_frames: Annotated[int, Range(1, 10_000)] = 20
    time_mask_share: Annotated[float, Range(1e-3, 1)] = 0.2
    placements: Annotated[tuple[Placement, ...], Items(0, 100)] = field(default=(), metadata=LATER)

    __post_init__ = check_ranges

    def are_read(self, placements: Sequence[str | None]) -> Bool[np.ndarray, " utterances"]:
        """Return for utterances at these placements whether a model trains on them."""
        names = [each or WITHOUT_PLACEMENT for each in placements]
        return np.array([not self.placements or name in self.placements for name in names], bool)

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
