"""The frames of utterances at another speed, and their targets (Ko et al. 2015).

Speech at another speed is resampled audio: its time shrinks by the factor.
"""

import numpy as np
from jaxtyping import Float64, Int64, UInt16

from pipeline.kbest import KBest
from pipeline.splicing import STACK, num_low_rate_frames
from pipeline.steps.features import MIN_FRAMES


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


def kbest_of_middles_at_speed(targets: KBest, num_frames: int, speed: float) -> KBest:
    """Give each 10 ms frame but the first and last the soft target of the nearest middle.

    `num_frames` are the stored frames, of which all but the first and last are middles.
    """
    return _rows(targets, np.rint(positions_at_speed(num_frames, speed)[1:-1]) - 1)


def _rows(targets: KBest, numbers: Float64[np.ndarray, " frames"]) -> KBest:
    """Take rows of soft targets, the first or last for numbers beyond."""
    return targets.rows(numbers.astype(np.int64).clip(0, len(targets.log_z) - 1))
