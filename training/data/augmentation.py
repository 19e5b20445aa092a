"""Augment a sub-epoch's utterances by SpecAugment and speed, drawn from their ids.

SpecAugment masks times and frequencies of log-mel frames (Park et al. 2019, section 2). Its time
warping is left out: it gained Park et al. least, and speed perturbation deforms time here.

Speech at another speed is resampled audio: its time shrinks by the factor, and its frequencies
rise by it (Ko et al. 2015). Log-mel frames are resampled along both axes, so no audio is read
again. Only that imports torch: an order is certified without it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from hashlib import shake_128
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float16, Float64, Int64, UInt16, UInt64

from pipeline.filterbank import NUM_BINS, STACK
from pipeline.filterbank.log_mel import HIGH_HZ, LOW_HZ, mel
from pipeline.kbest import KBest
from pipeline.shards import Alignment, KBestAtAllOffsets, PartitionRow, StoredKBest
from pipeline.splicing import num_low_rate_frames
from pipeline.steps.features import MIN_FRAMES
from training.settings.model_training import AugmentationConfig

if TYPE_CHECKING:
    from torch import Tensor


def draw_masks(
    words: UInt64[np.ndarray, "utterances twice_masks"],
    sizes: Int64[np.ndarray, " utterances"],
    max_width: int,
    max_share: float,
) -> Int64[np.ndarray, "utterances masks 2"]:
    """Turn each pair of 64 random bits into a mask [start, stop) of 0..`max_width` cells.

    An utterance has `sizes` cells. Widths are uniform, then places are (Park et al., F and T). All
    masks of an utterance cover at most `max_share` of it together; p of Park et al. bounds each
    alone.
    """
    masks = np.zeros((len(words), words.shape[1] // 2, 2), np.int64)
    left = np.floor(max_share * sizes).astype(np.int64)
    for number in range(masks.shape[1]):
        widths = _uniform(words[:, 2 * number], np.minimum(left, max_width))
        starts = _uniform(words[:, 2 * number + 1], sizes - widths)
        masks[:, number] = np.stack([starts, starts + widths], axis=-1)
        left -= widths
    return masks


def _uniform(
    words: UInt64[np.ndarray, " utterances"], most: Int64[np.ndarray, " utterances"]
) -> Int64[np.ndarray, " utterances"]:
    """Map 64 random bits to 0..most, both included; with 10^4 values 10^-15 off uniform."""
    drawn: Int64[np.ndarray, " utterances"] = (words % (most.astype(np.uint64) + 1)).astype(
        np.int64
    )
    return drawn


def num_frames_at_speed(
    num_frames: Int64[np.ndarray, " utterances"], speeds: Float64[np.ndarray, " utterances"]
) -> Int64[np.ndarray, " utterances"]:
    """Count the frames that lie within utterances of `num_frames`, `speeds` apart.

    No utterance of MIN_FRAMES gets fewer, so each has a low-rate frame at all offsets; shorter
    ones keep their speed.
    """
    counts = np.maximum(((num_frames - 1) / speeds).astype(np.int64) + 1, MIN_FRAMES)
    changed = (speeds != 1) & (num_frames >= MIN_FRAMES)
    kept: Int64[np.ndarray, " utterances"] = np.where(changed, counts, num_frames)
    return kept


def positions_at_speed(num_frames: int, speed: float) -> Float64[np.ndarray, " _frames"]:
    """Return where each frame of an utterance at another speed lies in the stored one."""
    (count,) = num_frames_at_speed(np.array([num_frames]), np.array([speed]))
    # Division and product round differently, so the last frame may lie 1e-13 beyond the end.
    positions: Float64[np.ndarray, " _frames"] = np.minimum(
        np.arange(count) * speed, num_frames - 1
    )
    return positions


def features_at_speed(
    features: Float16[np.ndarray, "frames bins"], speed: float
) -> Float16[np.ndarray, "_frames bins"]:
    """Interpolate log-mel frames linearly in time, then in mel: bin f reads bin f / speed.

    On AN4 the result is within 0.49 (root mean square; the features' own is 3.5) of the features
    of resampled audio, and without the second step within 1.32. Both interpolations are linear, so
    they commute with the mean that extraction subtracted.
    """
    import torch  # noqa: PLC0415 - counting the frames of an order does not need it

    # PyTorch widens float16 at 18 ns a frame, NumPy at 200; products and sums round alike.
    wide = torch.from_numpy(features.copy()).float()
    positions = positions_at_speed(len(features), speed)
    in_time = _interpolate(wide, torch.from_numpy(positions), 0)
    in_mel = _interpolate(in_time, torch.from_numpy(_bins_at_speed(speed)), 1)
    resampled: Float16[np.ndarray, "_frames bins"] = in_mel.half().numpy()
    return resampled


def _interpolate(values: "Tensor", positions: "Tensor", axis: int) -> "Tensor":
    """Interpolate linearly at fractional positions along one axis of a matrix."""
    low = positions.long().clamp(max=values.shape[axis] - 2)
    weights = (positions - low).float()
    result, upper = values.index_select(axis, low), values.index_select(axis, low + 1)
    # Product and sum are rounded apart: a processor's fused products would give other bits.
    upper -= result
    upper *= weights[:, None] if axis == 0 else weights
    return result.add_(upper)


@cache
def _bins_at_speed(speed: float) -> Float64[np.ndarray, " bins"]:
    """Return the fractional bin at 1 / speed of each bin's centre frequency."""
    low, high = mel(np.array([LOW_HZ, HIGH_HZ]))
    width = (high - low) / (NUM_BINS + 1)
    centres = low + width * np.arange(1, NUM_BINS + 1)
    frequencies_hz = 700 * (np.exp(centres / 1127) - 1)
    bins = (mel(frequencies_hz / speed) - low) / width - 1
    # Slow speech would have nothing in the highest bins; they repeat the last one instead.
    clipped: Float64[np.ndarray, " bins"] = np.clip(bins, 0, NUM_BINS - 1)
    return clipped


def alignment_at_speed(
    senones: UInt16[np.ndarray, " frames"], speed: float
) -> UInt16[np.ndarray, " _frames"]:
    """Give each frame the senone of the nearest stored one."""
    nearest = np.rint(positions_at_speed(len(senones), speed)).astype(np.int64)
    found: UInt16[np.ndarray, " _frames"] = senones[nearest]
    return found


def kbest_at_speed(targets: KBest, num_frames: int, offset: int, speed: float) -> KBest:
    """Give each low-rate frame the soft target whose middle is nearest to its own middle.

    `num_frames` are the stored 10 ms frames, of which the targets begin at `offset`.
    """
    positions = positions_at_speed(num_frames, speed)
    count = num_low_rate_frames(len(positions), offset)
    middles = positions[offset + 1 :: STACK][:count]
    return _rows(targets, np.rint((middles - offset - 1) / STACK))


def _rows(targets: KBest, numbers: Float64[np.ndarray, " frames"]) -> KBest:
    """Take rows of soft targets, the first or last for numbers beyond."""
    return targets.rows(numbers.astype(np.int64).clip(0, len(targets.log_z) - 1))


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
        frames: Float16[np.ndarray, "frames bins"],
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
        bins = np.full_like(counts, NUM_BINS)
        in_frequency = draw_masks(words[:, number:], bins, config.frequency_mask_bins, 1.0)
        # Plain numbers index arrays in a third of the time.
        spans = firsts[:, np.newaxis, np.newaxis] + in_time
        for start, stop in spans.reshape(-1, 2).tolist():
            frames[start:stop] = 0
        ends = (firsts + counts).tolist()
        for begin, end, own in zip(firsts.tolist(), ends, in_frequency.tolist(), strict=True):
            for start, stop in own:
                frames[begin:end, start:stop] = 0

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
    stored = row.targets
    targets: Alignment | StoredKBest
    if isinstance(stored, Alignment):
        targets = Alignment(alignment_at_speed(stored.senones, speed))
    elif isinstance(stored, KBestAtAllOffsets):
        # All frames but the first and last are middles: each takes the nearest stored one's target.
        middles = np.rint(positions_at_speed(num_frames, speed)[1:-1]) - 1
        targets = KBestAtAllOffsets(_rows(stored.kbest, middles))
    else:
        targets = kbest_at_speed(stored, num_frames, row.offset, speed)
    return replace(row, features=features_at_speed(row.features, speed), targets=targets)
