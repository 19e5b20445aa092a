"""Overlapping windows over long utterances, so that a device's memory bounds no utterance."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from infra.ranges import Range, check_ranges


@dataclass(frozen=True, slots=True)
class WindowsConfig:
    """WindowsConfig: longer utterances are labelled in windows of so many low-rate frames.

    At a cut a window hears `overlap_frames` beyond the frames that it labels, on either side.
    """

    window_frames: Annotated[int, Range(3, 1_000_000)] = 4000
    overlap_frames: Annotated[int, Range(0, 100_000)] = 200

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.window_frames <= 2 * self.overlap_frames:
            raise ValueError(
                f"overlap_frames = {self.overlap_frames}: need less than half of window_frames = "
                f"{self.window_frames}"
            )


@dataclass(frozen=True, slots=True)
class Window:
    """Window: the frames that the teacher hears, and those among them that it labels."""

    heard: range
    labelled: range

    @property
    def kept(self) -> slice:
        """Return the labelled frames by their places in the window."""
        first = self.labelled.start - self.heard.start
        return slice(first, first + len(self.labelled))


def windows(num_frames: int, config: WindowsConfig) -> Sequence[Window]:
    """Cut an utterance into the fewest windows of like length; one if it is short enough."""
    if num_frames <= config.window_frames:
        return [Window(range(num_frames), range(num_frames))]
    stride = config.window_frames - 2 * config.overlap_frames
    number = -(-num_frames // stride)
    edges = [num_frames * each // number for each in range(number + 1)]
    return [
        Window(
            range(
                max(0, first - config.overlap_frames),
                min(num_frames, last + config.overlap_frames),
            ),
            range(first, last),
        )
        for first, last in pairwise(edges)
    ]
