"""The frames of a pool's utterances in one array, and minibatches gathered from it by index."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float16, Float32, Int64, UInt16
from torch import Tensor

from pipeline.kbest import KBest, soft_targets
from pipeline.shards import PartitionRow
from pipeline.splicing import low_rate_alignment, splice
from training.data.batching import Segments
from training.models.losses import NO_LABEL

_ABSENT = 0
"""The row of zeros without a target, which stands for padding."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Padded inputs with hard labels, or with k-best senones and their probabilities."""

    features: Float[Tensor, "batch frames 192"]
    lengths: Int64[Tensor, " batch"]
    labels: Int64[Tensor, "batch frames"] | None
    senones: Int64[Tensor, "batch frames k"] | None
    probabilities: Float[Tensor, "batch frames k"] | None

    @property
    def num_frames(self) -> int:
        """Frames without padding."""
        return int(self.lengths.sum())


@dataclass(frozen=True, slots=True, eq=False)
class BufferFrames:
    """Low-rate frames and their targets, utterance after utterance; row 0 is padding.

    Utterance n has the `counts[n]` rows from `firsts[n]` on.
    """

    firsts: Int64[np.ndarray, " utterances"]
    counts: Int64[np.ndarray, " utterances"]
    features: Float16[np.ndarray, "rows 192"]
    labels: Int64[np.ndarray, " rows"] | None
    senones: UInt16[np.ndarray, "rows k"] | None
    probabilities: Float32[np.ndarray, "rows k"] | None

    @classmethod
    def of(cls, rows: Sequence[PartitionRow], sub_epoch_offset: int) -> "BufferFrames":
        """Splice each row at its own offset if its targets are soft, else at the sub-epoch's."""
        soft = rows[0].kbest is not None
        offsets = [row.offset if soft else sub_epoch_offset for row in rows]
        parts = [splice(row.features, offset) for row, offset in zip(rows, offsets, strict=True)]
        counts = np.array([len(part) for part in parts])
        firsts = np.cumsum(counts) - counts + 1
        features = np.concatenate([np.zeros((1, parts[0].shape[1]), np.float16), *parts])
        if not soft:
            return cls(firsts, counts, features, _labels(rows, sub_epoch_offset), None, None)
        kbest = _joined_kbest(rows)
        probabilities = soft_targets(kbest)
        probabilities[_ABSENT] = 0
        return cls(firsts, counts, features, None, kbest.senones, probabilities)

    @classmethod
    def join(cls, parts: Sequence["BufferFrames"]) -> "BufferFrames":
        """One pool of the utterances of all parts, in order."""
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
            _joined([part.labels for part in parts]),
            _joined([part.senones for part in parts]),
            _joined([part.probabilities for part in parts]),
        )

    def minibatch(self, segments: Segments, look_ahead: int) -> Minibatch:
        """Delay the targets by `look_ahead`, repeat the last frames as often, pad at the ends."""
        lengths = segments.stops - segments.starts
        steps = np.arange(lengths.max())
        present = steps < lengths[:, np.newaxis]
        positions = segments.starts[:, np.newaxis] + steps
        firsts = self.firsts[segments.utterances][:, np.newaxis]
        last = self.counts[segments.utterances][:, np.newaxis] - 1
        inputs = np.where(present, firsts + np.minimum(positions, last), _ABSENT)
        delayed = firsts + positions - look_ahead
        targets = np.where(present & (positions >= look_ahead), delayed, _ABSENT)
        return Minibatch(
            torch.from_numpy(self.features.take(inputs, axis=0)).float(),
            torch.from_numpy(lengths),
            _rows(self.labels, targets),
            _rows(self.senones, targets),
            _rows(self.probabilities, targets),
        )


def _joined(arrays: Sequence[np.ndarray | None]) -> np.ndarray | None:
    present = [array for array in arrays if array is not None]
    return np.concatenate(present) if present else None


def _rows(array: np.ndarray | None, rows: Int64[np.ndarray, "batch frames"]) -> Tensor | None:
    if array is None:
        return None
    chosen = array.take(rows, axis=0)
    return torch.from_numpy(chosen.astype(np.int64) if chosen.dtype == np.uint16 else chosen)


def _labels(rows: Sequence[PartitionRow], offset: int) -> Int64[np.ndarray, " rows"]:
    parts = [low_rate_alignment(row.alignment, offset) for row in rows if row.alignment is not None]
    assert len(parts) == len(rows), "a training partition's row has one kind of target"
    return np.concatenate([np.array([NO_LABEL]), *parts], dtype=np.int64)


def _joined_kbest(rows: Sequence[PartitionRow]) -> KBest:
    kbests = [row.kbest for row in rows if row.kbest is not None]
    assert len(kbests) == len(rows), "a training partition's row has one kind of target"
    k = kbests[0].senones.shape[1]
    return KBest(
        np.concatenate([np.zeros((1, k), np.uint16), *(kbest.senones for kbest in kbests)]),
        np.concatenate([np.zeros((1, k), np.float16), *(kbest.logits for kbest in kbests)]),
        np.concatenate([np.zeros(1, np.float16), *(kbest.log_z for kbest in kbests)]),
    )
