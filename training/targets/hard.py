"""Hard targets: one senone a frame, from a forced alignment (paper 003 II-C)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from pipeline.shards import Alignment, PartitionRow
from pipeline.splicing import low_rate_alignment
from training.models.losses import NO_LABEL, hard_cross_entropy, num_correct


@dataclass(frozen=True, slots=True, eq=False)
class HardTargets:
    """HardTargets: the labels of a minibatch's frames; NO_LABEL where a frame has none."""

    labels: Int64[Tensor, "batch frames"]

    def cross_entropy(self, logits: Float[Tensor, "batch frames senones"]) -> Float[Tensor, ""]:
        """Sum the cross-entropy over the frames."""
        return hard_cross_entropy(logits, self.labels)

    def num_correct(self, logits: Float[Tensor, "batch frames senones"]) -> Int64[Tensor, ""]:
        """Count the frames of which the best senone is the label."""
        return num_correct(logits, self.labels)


@dataclass(frozen=True, slots=True, eq=False)
class HardTargetRows:
    """HardTargetRows: the labels of a shuffle buffer's frames in a row; row 0 has none."""

    labels: Int64[np.ndarray, " rows"]

    @staticmethod
    def offsets(rows: Sequence[PartitionRow], sub_epoch_offset: int) -> list[int]:
        """Return where each row's low-rate frames begin: at the sub-epoch's offset."""
        return [sub_epoch_offset] * len(rows)

    @classmethod
    def of(cls, rows: Sequence[PartitionRow], sub_epoch_offset: int) -> "HardTargetRows":
        """Take each low-rate frame's label from its middle 10 ms frame."""
        present = [row.targets for row in rows if isinstance(row.targets, Alignment)]
        assert len(present) == len(rows), "a training partition's row has one kind of target"
        labels = [low_rate_alignment(each.senones, sub_epoch_offset) for each in present]
        # Row 0 is padding: without a label it adds no loss.
        return cls(np.concatenate([np.array([NO_LABEL]), *labels], dtype=np.int64))

    def take(self, rows: Int64[np.ndarray, "batch frames"]) -> HardTargets:
        """Gather a minibatch's targets by the number of the row."""
        return HardTargets(torch.from_numpy(self.labels.take(rows)))
