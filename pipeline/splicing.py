"""Three frames stacked, 30 ms advance, three offsets: the low frame rate (paper 003 II-B)."""

import numpy as np
from jaxtyping import Float, Integer

from pipeline.filterbank import STACK


def num_low_rate_frames(num_frames: int, offset: int) -> int:
    """Count the whole stacks of three frames from `offset` (0, 1 or 2) on."""
    if not 0 <= offset < STACK:
        raise ValueError(f"offset = {offset}: need 0..{STACK - 1}, {STACK} frames are stacked")
    return max(0, (num_frames - offset) // STACK)


def splice(
    frames: Float[np.ndarray, "frames bins"], offset: int
) -> Float[np.ndarray, "low_rate_frames stacked_bins"]:
    """Put frames offset + 3t .. offset + 3t + 2 side by side in row t: a view, not a copy."""
    num_rows = num_low_rate_frames(len(frames), offset)
    # As views, the three offsets of 003 II-B share one stored array.
    stacked = frames[offset : offset + STACK * num_rows]
    return stacked.reshape(num_rows, STACK * frames.shape[1])


def low_rate_alignment(
    alignment: Integer[np.ndarray, " frames"], offset: int
) -> Integer[np.ndarray, " low_rate_frames"]:
    """Label each row of `splice` with the senone of its middle frame."""
    return alignment[offset + 1 :: STACK][: num_low_rate_frames(len(alignment), offset)]
