"""The feature shard: one row per utterance, its energies un-spliced at 100 Hz (003 IV-B2)."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
from jaxtyping import Float16

from pipeline.audio_parts import AudioPart, part_from_text, part_to_text
from pipeline.filterbank import FRAME_SHIFT_MS, NUM_BINS
from pipeline.shards.container import Format, read_columns, read_rows, required, write_rows
from pipeline.shards.feature_cells import (
    Storage,
    common_storage,
    features_from_cell,
    features_to_cell,
    stated_storage,
)

FEATURE_FOOTER = {
    "num_bins": str(NUM_BINS),
    "frame_shift_ms": str(FRAME_SHIFT_MS),
    # The global mean and variance are not applied here: the model has them.
    "normalization": "causal speaker mean",
}
_PLAIN_FIELDS = (
    "utterance_id",
    "speaker_id",
    "duration_ms",
    "created_at",
    "audio_uri",
    "audio_etag",
    "text",
    "placement",
)
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
    # Only shards with converted audio or parts have them, so that all others keep their bytes.
    optional=(pa.field("audio_form", pa.string()), pa.field("audio_part", pa.string())),
)


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
    features: Float16[np.ndarray, "frames 64"]
    storage: Storage = "float16"
    audio_form: str | None = None
    audio_part: AudioPart | None = None


def write_features(rows: Sequence[FeatureRow]) -> bytes:
    """Write a feature shard in its rows' common storage, which the footer states.

    ValueError for features that are not finite float16 [frames 64].
    """
    storage = common_storage(row.storage for row in rows)
    names = ("audio_form", "audio_part")
    had = {name for name in names if any(getattr(row, name) is not None for row in rows)}
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
    optional = {"audio_form": row.audio_form, "audio_part": part_to_text(row.audio_part)}
    return {**cells, "num_frames": len(row.features), "features": features, **optional}


def _from_cells(cells: dict[str, Any], storage: Storage) -> FeatureRow:
    plain = {name: cells[name] for name in _PLAIN_FIELDS}
    where, num_frames = cells["utterance_id"], cells["num_frames"]
    features = features_from_cell(cells["features"], num_frames, storage, where)
    form, part = cells.get("audio_form"), part_from_text(cells.get("audio_part"))
    return FeatureRow(**plain, features=features, storage=storage, audio_form=form, audio_part=part)
