"""The feature shard: one row per utterance, its energies un-spliced at 100 Hz (003 IV-B2).

Features are stored as float16, or in one byte each, half of that: 256 levels per utterance and bin.
Lowest and highest value of a bin, as float16, are levels themselves. So features that were stored
once are stored again without a further change: writing partitions costs no precision.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, cast, get_args

import numpy as np
import pyarrow as pa
from jaxtyping import Float16, Float32, UInt8

from pipeline.filterbank import FRAME_SHIFT_MS, NUM_BINS
from pipeline.records import (
    AudioPart,
    Hypothesis,
    hypotheses_from_text,
    hypotheses_to_text,
    part_from_text,
    part_to_text,
)
from pipeline.settings import Storage
from pipeline.shards.container import (
    FLOAT16,
    UINT8,
    UINT16,
    Format,
    common,
    from_buffer,
    read_columns,
    read_rows,
    require_tensor,
    required,
    write_rows,
)

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


_INFINITY_BITS = 0x7C00
_RANGES_BYTES = 2 * NUM_BINS * FLOAT16.itemsize


def stated_storage(footer: dict[str, str]) -> Storage:
    """Read the storage from a footer."""
    if (dtype := footer.get("dtype")) not in get_args(Storage):
        raise ValueError(f"footer entry dtype = {dtype!r}: need one of {get_args(Storage)}")
    return cast(Storage, dtype)


def as_stored(
    features: Float16[np.ndarray, "frames bins"], storage: Storage
) -> Float16[np.ndarray, "frames bins"]:
    """Return the features as they will be read back."""
    return features if storage == "float16" else dequantize(*quantize(features))


def features_from_cell(
    cell: pa.Buffer | None, num_frames: int, storage: Storage, where: str
) -> Float16[np.ndarray, "frames bins"]:
    """Read a features cell as float16 [num_frames bins], all finite; float16 is a view of it."""
    name = f"{where} features"
    if storage == "float16":
        features = from_buffer(cell, FLOAT16, (num_frames, NUM_BINS), name)
        _require_finite(features, where)
        return features
    if cell is None or cell.size < _RANGES_BYTES:
        raise ValueError(f"{name}: need {_RANGES_BYTES} bytes of ranges, then the levels")
    ranges = from_buffer(cell.slice(0, _RANGES_BYTES), FLOAT16, (2, NUM_BINS), name)
    levels = from_buffer(cell.slice(_RANGES_BYTES), UINT8, (num_frames, NUM_BINS), name)
    _require_finite(ranges, where)
    return dequantize(ranges, levels)


def features_to_cell(
    features: Float16[np.ndarray, "frames bins"], storage: Storage, where: str
) -> bytes | np.ndarray:
    """Give the cell of float16 features [frames bins], all finite; float16 is its own."""
    require_tensor(features, FLOAT16, (len(features), NUM_BINS), f"{where} features")
    _require_finite(features, where)
    if storage == "float16":
        return np.ascontiguousarray(features)
    ranges, levels = quantize(features)
    return ranges.tobytes() + levels.tobytes()


def _require_finite(features: Float16[np.ndarray, "frames bins"], where: str) -> None:
    # Four times as fast as np.isfinite, which converts: 14 ms for 2.2 h.
    if features.size and int((features.view(UINT16) & 0x7FFF).max()) >= _INFINITY_BITS:
        raise ValueError(f"{where}: NaN or infinity among the features")


FEATURE_FOOTER = {
    "num_bins": str(NUM_BINS),
    "frame_shift_ms": str(FRAME_SHIFT_MS),
    # The global mean and variance are not applied here: the model has them.
    "normalization": "causal speaker mean",
}
_FORMAT = Format(
    pa.schema(
        [
            required("utterance_id", pa.string()),
            required("speaker_id", pa.string()),
            required("duration_ms", pa.int64()),
            required("created_at", pa.string()),
            required("audio_uri", pa.string()),
            required("audio_etag", pa.string()),
            pa.field("text", pa.string()),
            pa.field("placement", pa.string()),
            required("num_frames", pa.int32()),
            required("features", pa.binary()),
        ]
    ),
    {"shard": "features", **FEATURE_FOOTER},
    # Shards with converted audio, parts or hypotheses have them.
    optional=(
        pa.field("audio_form", pa.string()),
        pa.field("audio_part", pa.string()),
        pa.field("hypotheses", pa.string()),
    ),
)
_PLAIN_FIELDS = _FORMAT.schema.names[:-2]  # without num_frames and features


@dataclass(frozen=True, slots=True, eq=False)
class FeatureRow:
    """One utterance's log-mel energies after causal mean subtraction, and where they come from.

    `audio_form` states the rate and the channels of audio that was converted to 16 kHz mono.
    `audio_etag` is the MD5 of the object, of the member, or of the segment as a WAV of its own.
    """

    utterance_id: str
    speaker_id: str
    duration_ms: int
    created_at: str
    audio_uri: str
    audio_etag: str
    text: str | None
    placement: str | None
    features: Float16[np.ndarray, "frames bins"]
    storage: Storage = "float16"
    audio_form: str | None = None
    audio_part: AudioPart | None = None
    hypotheses: tuple[Hypothesis, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the transcript; none without one."""
        return tuple((self.text or "").split())


def write_features(rows: Sequence[FeatureRow]) -> bytes:
    """Write a feature shard in its rows' common storage, which the footer states.

    ValueError for features that are not finite float16 [frames bins].
    """
    storage: Storage = common("storage", (row.storage for row in rows), "float16")
    optional = [field.name for field in _FORMAT.optional]
    had = {name for name in optional if any(getattr(row, name) for row in rows)}
    cells = (_to_cells(row, storage) for row in rows)
    return write_rows(_FORMAT.having(had), cells, dtype=storage)


def read_features(data: bytes, chosen: Sequence[int] | None = None) -> list[FeatureRow]:
    """Read a feature shard in stored order; float16 arrays are views, to be read only.

    Only rows `chosen` by number, if given. ValueError for damaged bytes or tensors of another size
    than stated.
    """
    rows, footer = read_rows(_FORMAT, data, chosen)
    storage = stated_storage(footer)
    return [_from_cells(row, storage) for row in rows]


def read_feature_texts(file: BinaryIO | io.IOBase) -> list[str]:
    """Read only each row's transcript, in stored order; "" for a row without."""
    column = read_columns(_FORMAT, file, ("text",))["text"]
    return [text or "" for text in column.to_pylist()]


def _to_cells(row: FeatureRow, storage: Storage) -> dict[str, Any]:
    cells = {name: getattr(row, name) for name in _PLAIN_FIELDS}
    features = features_to_cell(row.features, storage, row.utterance_id)
    optional = {
        "audio_form": row.audio_form,
        "audio_part": part_to_text(row.audio_part),
        "hypotheses": hypotheses_to_text(row.hypotheses),
    }
    return {**cells, "num_frames": len(row.features), "features": features, **optional}


def _from_cells(cells: dict[str, Any], storage: Storage) -> FeatureRow:
    plain = {name: cells[name] for name in _PLAIN_FIELDS}
    where, num_frames = cells["utterance_id"], cells["num_frames"]
    features = features_from_cell(cells["features"], num_frames, storage, where)
    return FeatureRow(
        **plain,
        features=features,
        storage=storage,
        audio_form=cells.get("audio_form"),
        audio_part=part_from_text(cells.get("audio_part")),
        hypotheses=hypotheses_from_text(cells.get("hypotheses")),
    )
