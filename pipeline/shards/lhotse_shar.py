"""Shards of lhotse's Shar: cuts as JSON lines, and a tar file of arrays for each field.

`CutSet.from_shar(in_dir=...)` reads them. Fields at 33 Hz, of soft targets, begin at the row's
offset, which is in `custom`.
"""

import gzip
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.filterbank import FRAME_SHIFT_MS, NUM_BINS, SAMPLE_RATE_HZ
from pipeline.shards.features import FeatureRow
from pipeline.shards.partitions import Alignment, PartitionRow
from pipeline.shards.targets import KBestAtAllOffsets
from pipeline.splicing import STACK

FRAME_SHIFT_S = FRAME_SHIFT_MS / 1000
_IN_TAR = {"storage_type": "shar", "storage_path": "", "storage_key": ""}


def write_shar(folder: Path, number: int, rows: Sequence[FeatureRow | PartitionRow]) -> None:
    """Write shard `number`: features, and the alignment or k-best targets where rows have them.

    All shards of a folder have the same fields.
    """
    cuts, fields = [], dict[str, list[tuple[str, np.ndarray, dict[str, Any]]]]()
    for row in rows:
        arrays = {"features": (np.asarray(row.features, np.float32), _features(row))}
        for name, array in _targets(row).items():
            shift_s = FRAME_SHIFT_S if name == "alignment" else STACK * FRAME_SHIFT_S
            arrays[name] = (array, _temporal(array, shift_s))
        for name, (array, manifest) in arrays.items():
            fields.setdefault(name, []).append((row.utterance_id, array, manifest))
        cuts.append(_cut(row))
    for name, values in fields.items():
        _write_tar(folder / f"{name}.{number:06d}.tar", values)
    lines = "".join(f"{json.dumps(cut, ensure_ascii=False)}\n" for cut in cuts)
    # Without the time of day, so that equal shards have equal bytes.
    data = gzip.compress(lines.encode(), mtime=0)
    (folder / f"cuts.{number:06d}.jsonl.gz").write_bytes(data)


def _targets(row: FeatureRow | PartitionRow) -> Mapping[str, np.ndarray]:
    if isinstance(row, FeatureRow):
        return {}
    if isinstance(row.targets, Alignment):
        return {"alignment": row.targets.senones.astype(np.int32)}
    own = row.targets
    kbest = own.at(row.offset) if isinstance(own, KBestAtAllOffsets) else own
    return {
        "senones": kbest.senones.astype(np.int32),
        "logits": kbest.logits,
        "log_z": kbest.log_z,
    }


def _cut(row: FeatureRow | PartitionRow) -> dict[str, Any]:
    # Of whole frames, as lhotse compares a cut's duration with its features'.
    duration_s = _duration_s(row)
    supervision = {
        "id": row.utterance_id,
        "recording_id": row.utterance_id,
        "start": 0,
        "duration": duration_s,
        "channel": 0,
        "speaker": row.speaker_id,
        **({} if row.text is None else {"text": row.text}),
    }
    offset = {} if isinstance(row, FeatureRow) else {"offset": row.offset}
    return {
        "id": row.utterance_id,
        "start": 0,
        "duration": duration_s,
        "channel": 0,
        "supervisions": [supervision],
        "custom": {"duration_ms": row.duration_ms, **offset},
        "type": "MonoCut",
    }


def _duration_s(row: FeatureRow | PartitionRow) -> float:
    return round(len(row.features) * FRAME_SHIFT_S, 2)


def _features(row: FeatureRow | PartitionRow) -> dict[str, Any]:
    return {
        "type": "log_mel",
        "num_frames": len(row.features),
        "num_features": NUM_BINS,
        "frame_shift": FRAME_SHIFT_S,
        "sampling_rate": SAMPLE_RATE_HZ,
        "start": 0,
        "duration": _duration_s(row),
        "recording_id": row.utterance_id,
        "channels": 0,
        **_IN_TAR,
    }


def _temporal(array: np.ndarray, shift_s: float) -> dict[str, Any]:
    shape = {"array": {**_IN_TAR, "shape": list(array.shape)}}
    return {**shape, "temporal_dim": 0, "frame_shift": shift_s, "start": 0}


def _write_tar(path: Path, values: Sequence[tuple[str, np.ndarray, dict[str, Any]]]) -> None:
    with tarfile.open(path, "w") as archive:
        for key, array, manifest in values:
            data = io.BytesIO()
            np.save(data, array, allow_pickle=False)
            contents = ((".npy", data.getvalue()), (".json", json.dumps(manifest).encode()))
            for suffix, content in contents:
                member = tarfile.TarInfo(f"{key}{suffix}")  # of 1970: equal bytes
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
