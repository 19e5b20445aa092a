"""SpecAugment: masks of time and frequency on log-mel frames (Park et al. 2019, section 2).

Time warping, the third of its deformations, is left out: it gained Park et al. least, and speed
perturbation deforms time here.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float16, Int64, UInt64


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Masks holds for each utterance the intervals [starts, stops) of one axis; some are empty."""

    starts: Int64[np.ndarray, "utterances masks"]
    stops: Int64[np.ndarray, "utterances masks"]


def draw_masks(
    words: UInt64[np.ndarray, "utterances twice_masks"],
    sizes: Int64[np.ndarray, " utterances"],
    max_width: int,
    max_share: float,
) -> Masks:
    """Turn each pair of 64 random bits into a mask of 0..`max_width` out of `sizes` cells.

    Widths are uniform, then places are (Park et al., F and T). All masks of an utterance cover at
    most `max_share` of it together; p of Park et al. bounds each alone.
    """
    starts, stops = (np.zeros((len(words), words.shape[1] // 2), np.int64) for _ in range(2))
    left = np.floor(max_share * sizes).astype(np.int64)
    for mask in range(starts.shape[1]):
        widths = _uniform(words[:, 2 * mask], np.minimum(left, max_width))
        starts[:, mask] = _uniform(words[:, 2 * mask + 1], sizes - widths)
        stops[:, mask] = starts[:, mask] + widths
        left -= widths
    return Masks(starts, stops)


def _uniform(
    words: UInt64[np.ndarray, " utterances"], most: Int64[np.ndarray, " utterances"]
) -> Int64[np.ndarray, " utterances"]:
    """Map 64 random bits to 0..most, both included; with 10^4 values 10^-15 off uniform."""
    drawn: Int64[np.ndarray, " utterances"] = (words % (most.astype(np.uint64) + 1)).astype(
        np.int64
    )
    return drawn


def mask_frames(
    frames: Float16[np.ndarray, "frames bins"],
    firsts: Int64[np.ndarray, " utterances"],
    time_masks: Masks,
) -> None:
    """Set the masked frames to 0, in place; utterance n begins at frame `firsts[n]`."""
    first = firsts[:, np.newaxis]
    for start, stop in _intervals(first + time_masks.starts, first + time_masks.stops):
        frames[start:stop] = 0


def mask_bins(
    frames: Float16[np.ndarray, "frames bins"],
    firsts: Int64[np.ndarray, " utterances"],
    counts: Int64[np.ndarray, " utterances"],
    frequency_masks: Masks,
) -> None:
    """Set the masked bins of all `counts[n]` frames of utterance n to 0, in place."""
    ends = (firsts + counts).tolist()
    masks = zip(frequency_masks.starts, frequency_masks.stops, strict=True)
    for first, end, (starts, stops) in zip(firsts.tolist(), ends, masks, strict=True):
        for start, stop in _intervals(starts, stops):
            frames[first:end, start:stop] = 0


def _intervals(
    starts: Int64[np.ndarray, "*masks"], stops: Int64[np.ndarray, "*masks"]
) -> list[tuple[int, int]]:
    """List the intervals as plain numbers, which index arrays in a third of the time."""
    return list(zip(starts.ravel().tolist(), stops.ravel().tolist(), strict=True))
