"""Features in one byte each: 256 levels per utterance and bin, half of float16's size.

Lowest and highest value of a bin, as float16, are levels themselves. So features that were
stored once are stored again without a further change: writing partitions costs no precision.
"""

import numpy as np
from jaxtyping import Float16, Float32, UInt8

MAX_LEVEL = 255


def quantize(
    features: Float16[np.ndarray, "frames bins"],
) -> tuple[Float16[np.ndarray, "2 bins"], UInt8[np.ndarray, "frames bins"]]:
    """Find each bin's range and each value's nearest level, in 0..255."""
    if not len(features):
        return np.zeros((2, features.shape[1]), np.float16), features.astype(np.uint8)
    wide = features.astype(np.float32)
    low, high = wide.min(axis=0), wide.max(axis=0)
    per_level = np.divide(MAX_LEVEL, high - low, out=np.zeros_like(low), where=high > low)
    wide -= low
    wide *= per_level
    np.rint(wide, out=wide)
    return np.stack([low, high]).astype(np.float16), wide.astype(np.uint8)


def dequantize(
    ranges: Float16[np.ndarray, "2 bins"], levels: UInt8[np.ndarray, "frames bins"]
) -> Float16[np.ndarray, "frames bins"]:
    """Return the values of the levels."""
    low, high = ranges.astype(np.float32)
    step: Float32[np.ndarray, " bins"] = (high - low) / np.float32(MAX_LEVEL)
    values: Float32[np.ndarray, "frames bins"] = levels * step
    values += low
    # Rounded, low + 255 steps may miss a high near 0 by more than float16's spacing there.
    np.copyto(values, high, where=levels == MAX_LEVEL)
    np.clip(values, low, high, out=values)
    return values.astype(np.float16)
