"""The settings by which a training chooses its minibatch size as it goes (paper 004 section 4)."""

from dataclasses import dataclass
from typing import Annotated

from infra.settings import Items, Range, check_ranges

LOW_RATE_FRAME_S = 0.03


@dataclass(frozen=True, slots=True)
class MinibatchSelectionConfig:
    """MinibatchSelectionConfig: every so much data, try some minibatch sizes, and take the largest.

    Sizes are `minibatch_frames` times each of `factors`; training begins with the first, and one
    factor is no selection. After `every_hours` of all ranks' data the next `trial_hours` train each
    size from one state. The largest is taken whose training-set frame accuracy is within `harmless`
    percent points of the best of it and smaller ones.
    """

    factors: Annotated[tuple[Annotated[int, Range(1, 4096)], ...], Items(1, 20)] = (1,)
    every_hours: Annotated[float, Range(1e-6, 1e6)] = 24.0
    trial_hours: Annotated[float, Range(1e-6, 1e6)] = 0.75
    harmless: Annotated[float, Range(0, 100)] = 0.5

    def __post_init__(self) -> None:
        check_ranges(self)
        if list(self.factors) != sorted(set(self.factors)):
            raise ValueError(f"factors = {list(self.factors)}: need ascending numbers")

    def is_due(self, num_frames: int) -> bool:
        """Return whether to select after so many frames of all ranks since the last selection."""
        return len(self.factors) > 1 and num_frames >= self.every_hours * 3600 / LOW_RATE_FRAME_S

    def num_trial_minibatches(self, frames_of_all: int) -> int:
        """Return each rank's minibatches of a trial, where all ranks' have so many frames.

        The largest size has at least one step.
        """
        num_frames = self.trial_hours * 3600 / LOW_RATE_FRAME_S
        return max(round(num_frames / frames_of_all), self.factors[-1])
