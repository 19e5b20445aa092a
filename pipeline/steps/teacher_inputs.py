"""Inputs of teachers: of each utterance the low-rate frames, of features or of audio.

Frames of both are 30 ms apart, so that requests, windows and batches count frames whatever a
teacher hears.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float32

from pipeline.filterbank import SHIFT_SAMPLES
from pipeline.kbest import TeacherFailure
from pipeline.shards import FeatureRow
from pipeline.splicing import STACK, splice

SAMPLES_PER_FRAME = STACK * SHIFT_SAMPLES
"""The samples of 30 ms, from one low-rate frame's beginning to the next one's: 480."""

Frames = Float32[np.ndarray, "_frames _values"]
FramesAt = Callable[[int], Frames]
"""An offset, 0, 1 or 2, to the utterance's low-rate frames from there on."""


@dataclass(frozen=True, slots=True, eq=False)
class TeacherInput:
    """TeacherInput: an utterance's low-rate frames, and the seed of the draws from its tail.

    A frame has 192 features, or the 480 samples of its 30 ms.
    """

    frames: Frames
    seed: int


@runtime_checkable
class Hearing(Protocol):
    """Hearing reads a shard's utterances for a teacher; `engines` are the distributions it uses."""

    engines: ClassVar[tuple[str, ...]]

    def listen(self, rows: Sequence[FeatureRow]) -> Iterator[FramesAt | TeacherFailure]:
        """Yield the frames of each utterance, in order, or why it cannot be heard."""
        ...


@dataclass(frozen=True, slots=True)
class FeatureHearing:
    """FeatureHearing: the spliced log-mel energies, after subtraction of the causal mean."""

    engines: ClassVar[tuple[str, ...]] = ()

    def listen(self, rows: Sequence[FeatureRow]) -> Iterator[FramesAt | TeacherFailure]:
        """Yield the rows' own features."""
        return (partial(spliced_frames, row) for row in rows)


def spliced_frames(row: FeatureRow, offset: int) -> Float32[np.ndarray, "_frames 192"]:
    """Splice an utterance's features from an offset on."""
    return splice(row.features, offset).astype(np.float32)
