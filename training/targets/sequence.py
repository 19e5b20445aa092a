"""Lattice targets: what competes with the references of whole utterances (paper 003 II-C)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor

from pipeline.shards import Lattice
from training.models.losses import hard_cross_entropy, num_correct
from training.sequence_training.smbr import AlignedLattice, Smbr, SmbrBatch, smbr_loss
from training.targets.hard import HardTargetRows


@dataclass(frozen=True, slots=True, eq=False)
class SequenceTargets:
    """SequenceTargets: a minibatch's labels, and the lattices of its whole utterances."""

    labels: Int64[Tensor, "batch frames"]
    lattices: SmbrBatch

    def loss(self, logits: Float[Tensor, "batch frames senones"]) -> Float64[Tensor, ""]:
        """Return minus the expected number of right frames."""
        return smbr_loss(logits, self.lattices)

    def cross_entropy(self, logits: Float[Tensor, "batch frames senones"]) -> Float[Tensor, ""]:
        """Sum the labels' cross-entropy over the frames, to watch it."""
        return hard_cross_entropy(logits, self.labels)

    def num_correct(self, logits: Float[Tensor, "batch frames senones"]) -> Int64[Tensor, ""]:
        """Count the frames of which the best senone is the label."""
        return num_correct(logits, self.labels)


@dataclass(frozen=True, slots=True, eq=False)
class SequenceTargetRows:
    """SequenceTargetRows: the labels of a shuffle buffer's frames in a row; row 0 has none.

    An utterance's lattice is at the row of its first frame; all other rows have None.
    """

    labels: Int64[np.ndarray, " rows"]
    lattices: Shaped[np.ndarray, " rows"]
    criterion: Smbr

    @classmethod
    def of(
        cls,
        hard: HardTargetRows,
        firsts: Int64[np.ndarray, " utterances"],
        counts: Int64[np.ndarray, " utterances"],
        lattices: Sequence[Lattice | None],
        criterion: Smbr,
    ) -> "SequenceTargetRows":
        """Put lattices beside the labels; utterance n has `counts[n]` rows from `firsts[n]` on."""
        at_rows = np.full(len(hard.labels), None, dtype=object)
        for first, count, lattice in zip(firsts, counts, lattices, strict=True):
            if lattice is not None:
                at_rows[first] = AlignedLattice(lattice, hard.labels[first : first + count])
        return cls(hard.labels, at_rows, criterion)

    def take(self, rows: Int64[np.ndarray, "batch frames"]) -> SequenceTargets:
        """Gather the targets of whole utterances by the number of the row."""
        # The outputs before the delay is over come first and have no target: row 0.
        delay = int((rows[0] > 0).argmax())
        utterances = self.lattices.take(rows[:, delay]).tolist()
        batch = SmbrBatch.of(utterances, delay, self.criterion)
        return SequenceTargets(torch.from_numpy(self.labels.take(rows)), batch)
