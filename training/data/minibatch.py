"""The frames of a shuffle buffer in one array, and minibatches gathered from it by index."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Float16, Int64
from torch import Tensor

from pipeline.filterbank import STACK
from pipeline.shards import Alignment, PartitionRow
from pipeline.splicing import splice
from training.data.augmentation import NO_AUGMENTATION, Augmenter
from training.data.row_order import Segments, concatenated
from training.data.targets import (
    SOFT_TARGET_ROWS,
    HardTargetRows,
    HardTargets,
    SequenceTargetRows,
    SequenceTargets,
    SoftTargetRows,
    SoftTargets,
)
from training.settings.model_training import SoftTargetsForm

_PADDING = 0
"""The row of zeros without a target."""

_LOCATED_TOGETHER = 32
"""The minibatches of which rows are found at once; 32 of 2,048 frames take 3 MB."""

Targets: TypeAlias = HardTargets | SoftTargets | SequenceTargets
"""What a minibatch's frames are trained towards."""

TargetRows: TypeAlias = HardTargetRows | SoftTargetRows | SequenceTargetRows
"""What the frames of a shuffle buffer are trained towards."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Minibatch: padded inputs, the outputs of each segment without padding, and the targets.

    `num_early` of the outputs come before the first frame of their utterance, and have no target.
    """

    features: Float[Tensor, "batch frames dim"]
    lengths: Int64[Tensor, " batch"]
    targets: Targets
    num_early: int = 0

    @property
    def num_frames(self) -> int:
        """Count the frames that have a target, each once whatever the delay."""
        return int(self.lengths.sum()) - self.num_early


@dataclass(frozen=True, slots=True, eq=False)
class BufferFrames:
    """BufferFrames holds low-rate frames and targets, utterance after utterance; row 0 is padding.

    Utterance n has the `counts[n]` rows from `firsts[n]` on.
    """

    firsts: Int64[np.ndarray, " utterances"]
    counts: Int64[np.ndarray, " utterances"]
    features: Float16[np.ndarray, "rows dim"]
    targets: TargetRows

    @classmethod
    def of(
        cls,
        rows: Sequence[PartitionRow],
        sub_epoch_offset: int,
        augmenter: Augmenter = NO_AUGMENTATION,
        soft_targets: SoftTargetsForm | Literal["stored"] = "renormalized",
    ) -> "BufferFrames":
        """Augment and splice rows that all have hard targets, or all have soft ones."""
        rows = augmenter.at_speed(rows)
        is_hard = isinstance(rows[0].targets, Alignment)
        kind: type[HardTargetRows | SoftTargetRows]
        kind = HardTargetRows if is_hard else SOFT_TARGET_ROWS[soft_targets]
        offsets = kind.offsets(rows, sub_epoch_offset)
        # The three offsets are views of stored frames, so only the concatenation below copies.
        parts = [splice(row.features, offset) for row, offset in zip(rows, offsets, strict=True)]
        counts = np.array([len(part) for part in parts])
        firsts = np.cumsum(counts) - counts + 1
        features = np.concatenate([np.zeros((1, parts[0].shape[1]), np.float16), *parts])
        # Each 10 ms frame is in one row here, so a view without stacks is masked before splicing.
        frames = features.reshape(len(features) * STACK, -1)
        augmenter.mask(frames, [row.utterance_id for row in rows], STACK * firsts, STACK * counts)
        return cls(firsts, counts, features, kind.of(rows, sub_epoch_offset))

    @classmethod
    def join(cls, parts: Sequence["BufferFrames"]) -> "BufferFrames":
        """Join the utterances of all parts, in order; the parts have one kind of target."""
        if len(parts) == 1:
            return parts[0]
        num_rows = [len(part.features) for part in parts]
        begins = np.cumsum(num_rows) - num_rows
        return cls(
            np.concatenate(
                [part.firsts + first for part, first in zip(parts, begins, strict=True)]
            ),
            np.concatenate([part.counts for part in parts]),
            np.concatenate([part.features for part in parts]),
            concatenated([part.targets for part in parts]),
        )

    def minibatches(self, batches: Sequence[Segments], delay: int) -> Iterator[Minibatch]:
        """Delay the targets by `delay`, repeat the last frames as often, pad at the ends."""
        # Alone, the rows of each of the demo's minibatches took 1 % of its step.
        for first in range(0, len(batches), _LOCATED_TOGETHER):
            yield from self._gathered(batches[first : first + _LOCATED_TOGETHER], delay)

    def _gathered(self, batches: Sequence[Segments], delay: int) -> Iterator[Minibatch]:
        """Yield some minibatches, whose rows are found for all in one computation."""
        segments = concatenated(batches)
        lengths = segments.stops - segments.starts
        steps = np.arange(lengths.max())
        present = steps < lengths[:, np.newaxis]
        frames = segments.starts[:, np.newaxis] + steps
        firsts = self.firsts[segments.utterances][:, np.newaxis]
        last = self.counts[segments.utterances][:, np.newaxis] - 1
        # A delay repeats the last frame, so that delayed outputs cover all frames.
        inputs = np.where(present, firsts + np.minimum(frames, last), _PADDING)
        # Output t is trained towards frame t - delay; the first outputs have no target.
        labelled = np.where(present & (frames >= delay), firsts + frames - delay, _PADDING)
        num_early = np.clip(delay - segments.starts, 0, lengths)
        begin = 0
        for batch in batches:
            end = begin + len(batch.starts)
            own = lengths[begin:end]
            width = own.max()
            yield Minibatch(
                torch.from_numpy(self.features.take(inputs[begin:end, :width], axis=0)).float(),
                torch.from_numpy(own),
                self.targets.take(labelled[begin:end, :width]),
                int(num_early[begin:end].sum()),
            )
            begin = end
