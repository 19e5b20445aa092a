"""Packed cells: bytes by zstd, and whole numbers in as few bytes as their largest needs.

A cell unpacks to at most MAX_RATIO times its size, so that none exhausts memory.
"""

import numpy as np
import pyarrow as pa
from jaxtyping import Int64, Integer

MAX_RATIO = 64
_PLAIN, _ZSTD = b"\0", b"\1"
_WIDTHS = (1, 2, 4)
_CODEC = pa.Codec("zstd", compression_level=3)


def pack(raw: bytes) -> bytes:
    """Pack bytes; those that zstd does not shrink, or shrinks more than a reader allows, stay."""
    packed: bytes = _CODEC.compress(raw, asbytes=True)
    is_smaller = len(packed) < len(raw) <= MAX_RATIO * len(packed)
    return _ZSTD + packed if is_smaller else _PLAIN + raw


def unpack(cell: bytes, num_bytes: int, where: str) -> bytes:
    """Unpack exactly `num_bytes`; ValueError for a cell that holds others, or too many."""
    kind, body = cell[:1], cell[1:]
    if kind == _PLAIN and len(body) == num_bytes:
        return body
    if kind != _ZSTD or not 0 <= num_bytes <= MAX_RATIO * len(body):
        raise ValueError(f"{where}: {len(cell)} packed bytes: need {num_bytes} in them")
    try:
        found: bytes = _CODEC.decompress(body, num_bytes, asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{where}: {len(cell)} packed bytes: {error}") from error
    return found


def pack_integers(values: Integer[np.ndarray, " values"], where: str) -> bytes:
    """Pack whole numbers from 0 to 2^32 - 1; ValueError for others."""
    least, most = (int(values.min()), int(values.max())) if len(values) else (0, 0)
    if least < 0 or most >= 1 << 32:
        raise ValueError(f"{where}: {least}..{most}: need 0..{(1 << 32) - 1}")
    width = next(each for each in _WIDTHS if most < 1 << (8 * each))
    return bytes([width]) + pack(values.astype(f"<u{width}").tobytes())


def unpack_integers(cell: bytes, count: int, most: int, where: str) -> Int64[np.ndarray, " values"]:
    """Unpack `count` whole numbers up to `most`; ValueError for a cell that holds others."""
    width = cell[0] if cell else 0
    if width not in _WIDTHS:
        raise ValueError(f"{where}: numbers of {width} bytes: need one of {_WIDTHS}")
    raw = unpack(cell[1:], count * width, where)
    values = np.frombuffer(raw, f"<u{width}").astype(np.int64)
    if count and values.max() > most:
        raise ValueError(f"{where}: {values.max()}: need at most {most}")
    return values
