"""Augment the utterances of a sub-epoch as a recipe asks, by draws from their ids."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import shake_128

import numpy as np
from jaxtyping import Float16, Float64, Int64, UInt64

from pipeline.filterbank import NUM_BINS
from pipeline.shards import Alignment, KBestAtAllOffsets, PartitionRow, StoredKBest
from pipeline.steps.features import MIN_FRAMES
from training.augmentation.spec_augment import draw_masks, mask_bins, mask_frames
from training.augmentation.speed import (
    alignment_at_speed,
    kbest_at_speed,
    kbest_of_middles_at_speed,
    num_frames_at_speed,
)
from training.configuration.augmentation import AugmentationConfig


@dataclass(frozen=True, slots=True)
class Augmenter:
    """Augmenter augments the utterances of sub-epoch number `sub_epoch`.

    All draws come from seed, sub-epoch and utterance id: any number of ranks, any partitions and a
    resumed training make the same bytes.
    """

    config: AugmentationConfig
    seed: int
    sub_epoch: int

    def num_frames(
        self, utterance_ids: Sequence[str], num_frames: Int64[np.ndarray, " utterances"]
    ) -> Int64[np.ndarray, " utterances"]:
        """Count the 10 ms frames of utterances at their drawn speeds; no feature is needed."""
        return num_frames_at_speed(num_frames, self._speeds(utterance_ids))

    def at_speed(self, rows: Sequence[PartitionRow]) -> Sequence[PartitionRow]:
        """Return the rows at their drawn speeds, features and targets alike."""
        if not self.config.changes_speed:
            return rows
        speeds = self._speeds([row.utterance_id for row in rows])
        return [_at_speed(row, speed) for row, speed in zip(rows, speeds.tolist(), strict=True)]

    def mask(
        self,
        frames: Float16[np.ndarray, "frames 64"],
        utterance_ids: Sequence[str],
        firsts: Int64[np.ndarray, " utterances"],
        counts: Int64[np.ndarray, " utterances"],
    ) -> None:
        """Mask frames and bins in place; utterance n has the `counts[n]` frames from `firsts[n]`.

        A masked cell becomes 0, the speaker's own causal mean at that moment.
        """
        # A bin's global mean is at most 0.07 standard deviations from 0 on AN4, and differs by run.
        config, number = self.config, 2 * self.config.time_masks
        if not config.num_masks:
            return
        words = self._words(utterance_ids, 1 + 2 * config.num_masks)[:, 1:]
        in_time = draw_masks(
            words[:, :number], counts, config.time_mask_frames, config.time_mask_share
        )
        mask_frames(frames, firsts, in_time)
        bins = np.full_like(counts, NUM_BINS)
        in_frequency = draw_masks(words[:, number:], bins, config.frequency_mask_bins, 1.0)
        mask_bins(frames, firsts, counts, in_frequency)

    def _speeds(self, utterance_ids: Sequence[str]) -> Float64[np.ndarray, " utterances"]:
        words = self._words(utterance_ids, 1)[:, 0]
        speeds: Float64[np.ndarray, " utterances"] = np.array(self.config.speed)[
            words % np.uint64(len(self.config.speed))
        ]
        return speeds

    def _words(
        self, utterance_ids: Sequence[str], num_words: int
    ) -> UInt64[np.ndarray, "utterances words"]:
        """Return 64 random bits for each draw of each utterance; more words begin with the same."""
        key = self.seed.to_bytes(8, "little") + self.sub_epoch.to_bytes(8, "little")
        # A hash costs 1 us an utterance; seeding a NumPy generator takes 15.
        digests = [shake_128(key + name.encode()).digest(8 * num_words) for name in utterance_ids]
        return np.frombuffer(b"".join(digests), "<u8").reshape(len(digests), num_words)


NO_AUGMENTATION = Augmenter(AugmentationConfig(), 0, 0)
"""Utterances as they are stored."""


def _at_speed(row: PartitionRow, speed: float) -> PartitionRow:
    num_frames = len(row.features)
    # As `num_frames_at_speed` counts: the same bits, and too short an utterance as it is.
    if speed == 1 or num_frames < MIN_FRAMES:
        return row
    # It imports torch, which counting the frames of an order does not need.
    from training.augmentation.speed_features import features_at_speed  # noqa: PLC0415

    features = features_at_speed(row.features, speed)
    return replace(row, features=features, targets=_targets_at_speed(row, speed))


def _targets_at_speed(row: PartitionRow, speed: float) -> Alignment | StoredKBest:
    targets, num_frames = row.targets, len(row.features)
    if isinstance(targets, Alignment):
        return Alignment(alignment_at_speed(targets.senones, speed))
    if isinstance(targets, KBestAtAllOffsets):
        return KBestAtAllOffsets(kbest_of_middles_at_speed(targets.kbest, num_frames, speed))
    return kbest_at_speed(targets, num_frames, row.offset, speed)
