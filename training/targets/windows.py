"""Overlapping windows over long utterances, so that a device's memory bounds no utterance."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from training.configuration.targets import WindowsConfig


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
