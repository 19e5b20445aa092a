"""Targets of minibatches: senones, the teacher's k best, or lattices (paper 003 II-C, V-C).

Hard targets are one senone a frame, of a forced alignment. Soft targets are the teacher's k best
senones a frame with their probabilities. Sequence targets are what competes with the references
of whole utterances. Minibatches gather their targets from the rows of a shuffle buffer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Float16, Float32, Float64, Int64, Shaped, UInt16
from torch import Tensor

from pipeline.filterbank import STACK
from pipeline.kbest import KBest, best_probabilities, soft_targets
from pipeline.shards import Alignment, KBestAtAllOffsets, Lattice, PartitionRow
from pipeline.shards.targets import at_offset
from pipeline.splicing import low_rate_alignment, num_low_rate_frames
from training.models.losses import (
    NO_LABEL,
    ghost_cross_entropy,
    hard_cross_entropy,
    kbest_cross_entropy,
    num_correct,
)
from training.sequence_training.smbr import AlignedLattice, Smbr, SmbrBatch, smbr_loss
from training.settings.model_training import SoftTargetsForm


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


@dataclass(frozen=True, slots=True, eq=False)
class BestTargetRows(HardTargetRows):
    """BestTargetRows: the best target of a shuffle buffer's frames as their label, at any offset.

    A target labels the 10 ms frames of its stack, as an alignment would: at another offset a
    low-rate frame has the target of the stack that its middle is in, at most 10 ms from its own
    middle. At an end that no stack covers it has the target of the nearest stack.
    """

    @staticmethod
    def offsets(rows: Sequence[PartitionRow], sub_epoch_offset: int) -> list[int]:
        """Return where each row's low-rate frames begin: so many after its own offset."""
        return SoftTargetRows.offsets(rows, sub_epoch_offset)

    @classmethod
    def of(cls, rows: Sequence[PartitionRow], sub_epoch_offset: int) -> "BestTargetRows":
        """Take the first of the stored targets, which is the best."""
        labels = [
            _best_at(row, offset)
            for row, offset in zip(rows, cls.offsets(rows, sub_epoch_offset), strict=True)
        ]
        return cls(np.concatenate([np.array([NO_LABEL]), *labels], dtype=np.int64))


def _best_at(row: PartitionRow, offset: int) -> Int64[np.ndarray, " low_rate_frames"]:
    targets = row.targets
    assert not isinstance(targets, Alignment), "a training partition's row has one kind of target"
    stored = at_offset(targets, offset)
    best = stored.senones[:, 0].astype(np.int64)
    middles = offset + 1 + STACK * np.arange(num_low_rate_frames(len(row.features), offset))
    if not len(best):
        # Too short for its own offset, it can have a frame at another one.
        return np.full(len(middles), NO_LABEL)
    first = offset if isinstance(targets, KBestAtAllOffsets) else row.offset
    return best.take((middles - first) // STACK, mode="clip")


@dataclass(frozen=True, slots=True, eq=False)
class SoftTargets:
    """SoftTargets: a minibatch's k best senones; all probabilities 0 where a frame has none."""

    senones: Int64[Tensor, "batch frames k"]
    probabilities: Float[Tensor, "batch frames k"]

    def cross_entropy(self, logits: Float[Tensor, "batch frames senones"]) -> Float[Tensor, ""]:
        """Sum the cross-entropy over the frames."""
        return kbest_cross_entropy(logits, self.senones, self.probabilities)

    def num_correct(self, logits: Float[Tensor, "batch frames senones"]) -> Int64[Tensor, ""]:
        """Count the frames of which the best senone is the teacher's best."""
        has_target = self.probabilities[..., 0] > 0
        return num_correct(logits, self.senones[..., 0].where(has_target, NO_LABEL))


@dataclass(frozen=True, slots=True, eq=False)
class GhostTargets(SoftTargets):
    """GhostTargets: the k best with the teacher's own probabilities, which sum to at most one."""

    def cross_entropy(self, logits: Float[Tensor, "batch frames senones"]) -> Float[Tensor, ""]:
        """Sum the cross-entropy over the frames, with one class for all other senones."""
        return ghost_cross_entropy(logits, self.senones, self.probabilities)


@dataclass(frozen=True, slots=True, eq=False)
class SoftTargetRows:
    """SoftTargetRows: the k best senones of a shuffle buffer's frames in a row; row 0 has none."""

    senones: UInt16[np.ndarray, "rows k"]
    probabilities: Float32[np.ndarray, "rows k"]

    @staticmethod
    def offsets(rows: Sequence[PartitionRow], sub_epoch_offset: int) -> list[int]:
        """Return where each row's low-rate frames begin: so many after its own offset."""
        # The teacher labelled each utterance from its own offset on, a hash of its id. Only
        # targets at all three offsets are read at others (check_offsets).
        return [(row.offset + sub_epoch_offset) % STACK for row in rows]

    @classmethod
    def of(cls, rows: Sequence[PartitionRow], sub_epoch_offset: int) -> "SoftTargetRows":
        """Turn the stored logits to probabilities."""
        offsets = cls.offsets(rows, sub_epoch_offset)
        kbests = [
            at_offset(row.targets, offset)
            for row, offset in zip(rows, offsets, strict=True)
            if not isinstance(row.targets, Alignment)
        ]
        assert len(kbests) == len(rows), "a training partition's row has one kind of target"
        k = kbests[0].senones.shape[1]
        joined = KBest(
            np.concatenate([np.zeros((1, k), np.uint16), *(kbest.senones for kbest in kbests)]),
            np.concatenate([np.zeros((1, k), np.float16), *(kbest.logits for kbest in kbests)]),
            np.concatenate([np.zeros(1, np.float16), *(kbest.log_z for kbest in kbests)]),
            tail_samples=kbests[0].tail_samples,
        )
        probabilities = cls.of_kbest(joined)
        # Without target mass, padding adds neither loss nor gradient.
        probabilities[0] = 0
        return cls.joining(joined, probabilities)

    @classmethod
    def joining(
        cls, kbest: KBest, probabilities: Float32[np.ndarray, "rows k"]
    ) -> "SoftTargetRows":
        """Keep what the minibatches need of all rows' k best."""
        return cls(kbest.senones, probabilities)

    @staticmethod
    def of_kbest(kbest: KBest) -> Float32[np.ndarray, "frames k"]:
        """Normalize the stored logits to probabilities."""
        return soft_targets(kbest)

    def take(self, rows: Int64[np.ndarray, "batch frames"]) -> SoftTargets:
        """Gather a minibatch's targets by the number of the row."""
        return SoftTargets(
            torch.from_numpy(self.senones.take(rows, axis=0).astype(np.int64)),
            torch.from_numpy(self.probabilities.take(rows, axis=0)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class GhostTargetRows(SoftTargetRows):
    """GhostTargetRows: the k best of a shuffle buffer's frames with what log Z says they hold."""

    @staticmethod
    def of_kbest(kbest: KBest) -> Float32[np.ndarray, "frames k"]:
        """Return the teacher's own probabilities."""
        assert kbest.tail_samples == 0, "a recipe with both is refused"
        probabilities = best_probabilities(kbest)
        # float16 rounds log Z, so that all of the probability can sum to 1.004.
        probabilities /= np.maximum(probabilities.sum(axis=1, keepdims=True), 1)
        return probabilities

    def take(self, rows: Int64[np.ndarray, "batch frames"]) -> GhostTargets:
        """Gather a minibatch's targets by the number of the row."""
        taken = SoftTargetRows.take(self, rows)
        return GhostTargets(taken.senones, taken.probabilities)


@dataclass(frozen=True, slots=True, eq=False)
class StoredTargets(SoftTargets):
    """StoredTargets: the k best with their logits and log Z, as they are stored, as float32.

    Both are relative to the frame's largest logit, so exp(logits - log_z) are the teacher's own
    probabilities. `probabilities` are renormalized over the k, and 0 where a frame has no target.
    """

    logits: Float[Tensor, "batch frames k"]
    log_z: Float[Tensor, "batch frames"]


@dataclass(frozen=True, slots=True, eq=False)
class StoredTargetRows(SoftTargetRows):
    """StoredTargetRows: the k best of a shuffle buffer's frames, with logits and log Z."""

    logits: Float16[np.ndarray, "rows k"]
    log_z: Float16[np.ndarray, " rows"]

    @classmethod
    def joining(
        cls, kbest: KBest, probabilities: Float32[np.ndarray, "rows k"]
    ) -> "StoredTargetRows":
        """Keep the stored numbers too."""
        return cls(kbest.senones, probabilities, kbest.logits, kbest.log_z)

    def take(self, rows: Int64[np.ndarray, "batch frames"]) -> StoredTargets:
        """Gather a minibatch's targets by the number of the row."""
        taken = SoftTargetRows.take(self, rows)
        stored = (self.logits.take(rows, axis=0), self.log_z.take(rows))
        logits, log_z = (torch.from_numpy(each.astype(np.float32)) for each in stored)
        return StoredTargets(taken.senones, taken.probabilities, logits, log_z)


SOFT_TARGET_ROWS: Mapping[
    SoftTargetsForm | Literal["stored"], type[SoftTargetRows | BestTargetRows]
] = {
    "renormalized": SoftTargetRows,
    "ghost": GhostTargetRows,
    "best": BestTargetRows,
    "stored": StoredTargetRows,
}
"""The rows of a shuffle buffer's soft targets, by their form; recipes name all but the last."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceTargets(HardTargets):
    """SequenceTargets: a minibatch's labels, and the lattices of its whole utterances.

    The labels' cross-entropy is only watched.
    """

    lattices: SmbrBatch

    def loss(self, logits: Float[Tensor, "batch frames senones"]) -> Float64[Tensor, ""]:
        """Return minus the expected number of right frames."""
        return smbr_loss(logits, self.lattices)


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
