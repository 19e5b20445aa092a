"""Arrays to and from raw little-endian bytes of a stated shape."""

import math
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.kbest import KBest, check_kbest

FLOAT16 = np.dtype("<f2")
FLOAT32 = np.dtype("<f4")
UINT16 = np.dtype("<u2")
UINT8 = np.dtype("u1")


def from_buffer(
    cell: pa.Buffer | None, dtype: np.dtype[Any], shape: tuple[int, ...], where: str
) -> np.ndarray:
    """View `cell` as an array; ValueError unless it has exactly the bytes of `shape`."""
    num_bytes = 0 if cell is None else cell.size
    expected = math.prod(shape) * dtype.itemsize
    if cell is None or min(shape) < 0 or num_bytes != expected:
        raise ValueError(f"{where}: {num_bytes} bytes: need {expected}, shape {shape} of {dtype}")
    return np.frombuffer(cell, dtype).reshape(shape)


def to_bytes(array: np.ndarray, dtype: np.dtype[Any], shape: tuple[int, ...], where: str) -> bytes:
    """Give the raw bytes of `array`; ValueError if it has another type or shape."""
    require_tensor(array, dtype, shape, where)
    return array.tobytes()  # no memoryview: pyarrow 26 never releases those


def require_tensor(
    array: np.ndarray, dtype: np.dtype[Any], shape: tuple[int, ...], where: str
) -> None:
    """Raise ValueError if `array` has another type or shape."""
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{where}: {array.dtype} {array.shape}: need {dtype} {shape}")


def kbest_from_cells(
    row: dict[str, Any], shape: tuple[int, int], tail_samples: int, where: str
) -> KBest:
    """View the cells senones, logits and log_z of `row` as k-best targets, checked.

    The last `tail_samples` of the `shape`'s columns were drawn.
    """
    kbest = KBest(
        from_buffer(row["senones"], UINT16, shape, f"{where} senones"),
        from_buffer(row["logits"], FLOAT16, shape, f"{where} logits"),
        from_buffer(row["log_z"], FLOAT16, shape[:1], f"{where} log_z"),
        tail_samples=tail_samples,
    )
    check_kbest(kbest, where)
    return kbest


def kbest_to_cells(kbest: KBest, num_frames: int, k: int, where: str) -> dict[str, bytes]:
    """Give the cells senones, logits and log_z of k-best targets, checked."""
    cells = {
        "senones": to_bytes(kbest.senones, UINT16, (num_frames, k), f"{where} senones"),
        "logits": to_bytes(kbest.logits, FLOAT16, (num_frames, k), f"{where} logits"),
        "log_z": to_bytes(kbest.log_z, FLOAT16, (num_frames,), f"{where} log_z"),
    }
    check_kbest(kbest, where)
    return cells
