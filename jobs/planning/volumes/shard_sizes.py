"""Compute mean frames and bytes of the pipeline's shards in closed form."""

from math import ceil

from pipeline.filterbank import FRAME_SHIFT_MS, NUM_BINS
from pipeline.shards import Offsets, Storage
from pipeline.shards.container import ROW_GROUP_ROWS
from pipeline.splicing import STACK

FRAMES_PER_HOUR = 3_600_000 // FRAME_SHIFT_MS
# Parquet adds, fitted to shards of 1 to 1,280 rows: a file, a row group, a row with its texts.
_FILE_BYTES, _GROUP_BYTES = 1_500, 800
_FEATURE_ROW_BYTES, _TARGET_ROW_BYTES, _PARTITION_ROW_BYTES = 190, 45, 75


def num_frames(hours: float, utterances: float) -> float:
    """Return frames of 10 ms: t seconds have 100 t - 2 on average, as every window lies within."""
    return max(hours * FRAMES_PER_HOUR - 2 * utterances, 0)


def num_low_rate_frames(hours: float, utterances: float) -> float:
    """Return low-rate frames at one offset: (F - 2) / 3 of F on average over the three."""
    return max((num_frames(hours, utterances) - 2 * utterances) / STACK, 0)


def num_target_frames(hours: float, utterances: float, offsets: Offsets) -> float:
    """Return low-rate frames that the teacher labels: at one offset of each utterance, or all."""
    return num_low_rate_frames(hours, utterances) * (STACK if offsets == "all" else 1)


def feature_bytes(hours: float, utterances: float, shards: float, storage: Storage) -> float:
    """Return the bytes of feature shards: NUM_BINS values a frame."""
    cells = _feature_cells(hours, utterances, storage)
    return cells + _parquet(utterances, shards, _FEATURE_ROW_BYTES)


def target_bytes(
    hours: float, utterances: float, shards: float, k: int, offsets: Offsets = "one"
) -> float:
    """Return the bytes of target shards: k senones, k logits and log Z, 2 bytes each, a frame."""
    frames = num_target_frames(hours, utterances, offsets)
    return frames * (4 * k + 2) + _parquet(utterances, shards, _TARGET_ROW_BYTES)


def partition_bytes(
    hours: float,
    utterances: float,
    partitions: float,
    k: int,
    storage: Storage,
    offsets: Offsets = "one",
) -> float:
    """Return the bytes of training partitions: features and targets side by side."""
    cells = _feature_cells(hours, utterances, storage)
    targets = num_target_frames(hours, utterances, offsets) * (4 * k + 2)
    parquet = _parquet(utterances, partitions, _PARTITION_ROW_BYTES)
    return cells + targets + parquet


def _feature_cells(hours: float, utterances: float, storage: Storage) -> float:
    values = num_frames(hours, utterances) * NUM_BINS
    # A cell of uint8 begins with each bin's range.
    return 2 * values if storage == "float16" else values + utterances * 2 * NUM_BINS * 2


def _parquet(utterances: float, files: float, row_bytes: int) -> float:
    groups = files * ceil(utterances / max(files, 1) / ROW_GROUP_ROWS)
    return files * _FILE_BYTES + groups * _GROUP_BYTES + utterances * row_bytes
