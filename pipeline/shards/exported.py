"""Shards for other tools: Kaldi's binary archives with their scp files, and lhotse's Shar.

A folder of archives is a Kaldi data directory: `feats.scp`, `utt2spk`, `text`, `utt2dur`, and
`ali.scp` or `post.scp` of targets. A folder of Shar has cuts as JSON lines, and a tar file of
arrays for each field, which `CutSet.from_shar(in_dir=...)` reads. Fields at 33 Hz, of soft targets,
begin at the row's offset, which is in `utt2offset`, or in the cut's `custom`.
"""

import gzip
import io
import json
import re
import struct
import tarfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from jaxtyping import Float32, Shaped

from pipeline.filterbank import FRAME_SHIFT_MS, NUM_BINS, SAMPLE_RATE_HZ, STACK
from pipeline.kbest import best_probabilities
from pipeline.shards.features import FeatureRow
from pipeline.shards.partitions import Alignment, PartitionRow
from pipeline.shards.targets import at_offset

_BINARY = b"\0B"
_SPACE = re.compile(r"\s")
_INT, _PAIR = (
    np.dtype([("size", "i1"), ("value", "<i4")]),
    np.dtype([("int_size", "i1"), ("senone", "<i4"), ("float_size", "i1"), ("probability", "<f4")]),
)


class KaldiFolder:
    """KaldiFolder writes an archive a shard; `finish` writes the sorted lists of all.

    ValueError for an utterance or speaker whose id has a space, which Kaldi cannot read.
    """

    def __init__(self, folder: Path) -> None:
        # Kaldi reads scp files wherever it is started.
        self._folder = folder.resolve()
        self._lines: dict[str, dict[str, str]] = defaultdict(dict)

    def write_shard(self, number: int, rows: Sequence[FeatureRow | PartitionRow]) -> None:
        """Write one shard's archives: features at 100 Hz, alignments too, posteriors at 33 Hz."""
        contents: dict[str, dict[str, bytes]] = defaultdict(dict)
        for row in rows:
            key = _key(row.utterance_id)
            contents["feats"][key] = matrix_bytes(row.features.astype(np.float32))
            self._lines["utt2spk"][key] = _key(row.speaker_id)
            self._lines["utt2dur"][key] = f"{row.duration_ms / 1000:.3f}"
            if row.text is not None:
                self._lines["text"][key] = row.text
            if isinstance(row, FeatureRow):
                continue
            if isinstance(row.targets, Alignment):
                contents["ali"][key] = alignment_bytes(row.targets.senones)
                continue
            kbest = at_offset(row.targets, row.offset)
            contents["post"][key] = posterior_bytes(
                kbest.senones[:, : kbest.num_best], best_probabilities(kbest)
            )
            self._lines["utt2offset"][key] = str(row.offset)
        for kind, values in contents.items():
            path = self._folder / f"{kind}.{number:06d}.ark"
            with path.open("wb") as file:
                for key, data in values.items():
                    file.write(f"{key} ".encode())
                    self._lines[f"{kind}.scp"][key] = f"{path}:{file.tell()}"
                    file.write(data)

    def finish(self) -> None:
        """Write the scp files and lists in the order of bytes, as Kaldi wants them."""
        for utterance, speaker in _ordered(self._lines["utt2spk"]):
            said = self._lines["spk2utt"].get(speaker, "")
            self._lines["spk2utt"][speaker] = f"{said} {utterance}".strip()
        for name, lines in self._lines.items():
            text = "".join(f"{key} {value}".rstrip() + "\n" for key, value in _ordered(lines))
            (self._folder / name).write_text(text, encoding="utf-8")


def _ordered(lines: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted(lines.items(), key=lambda each: each[0].encode())


def matrix_bytes(matrix: Float32[np.ndarray, "rows columns"]) -> bytes:
    """Write a matrix of floats as Kaldi does."""
    rows, columns = matrix.shape
    head = struct.pack("<bibi", 4, rows, 4, columns)
    return _BINARY + b"FM " + head + np.ascontiguousarray(matrix, "<f4").tobytes()


def alignment_bytes(senones: Shaped[np.ndarray, " frames"]) -> bytes:
    """Write a vector of integers as Kaldi does, each with its size before it."""
    values = np.empty(len(senones), _INT)
    values["size"], values["value"] = 4, senones
    return _BINARY + struct.pack("<bi", 4, len(senones)) + values.tobytes()


def posterior_bytes(
    senones: Shaped[np.ndarray, "frames k"], probabilities: Float32[np.ndarray, "frames k"]
) -> bytes:
    """Write a list of senones with probabilities for each frame, as Kaldi's Posterior."""
    frames, k = senones.shape
    pairs = np.empty((frames, k), _PAIR)
    pairs["int_size"] = pairs["float_size"] = 4
    pairs["senone"], pairs["probability"] = senones, probabilities
    count = struct.pack("<bi", 4, k)
    body = b"".join(count + frame.tobytes() for frame in pairs)
    return _BINARY + struct.pack("<bi", 4, frames) + body


def _key(name: str) -> str:
    if _SPACE.search(name) or not name:
        raise ValueError(f"{name!r} has a space: Kaldi's keys have none: export to lhotse Shar")
    return name


FRAME_SHIFT_S = FRAME_SHIFT_MS / 1000
_IN_TAR = {"storage_type": "shar", "storage_path": "", "storage_key": ""}


def write_shar(folder: Path, number: int, rows: Sequence[FeatureRow | PartitionRow]) -> None:
    """Write shard `number`: features, and the alignment or k-best targets where rows have them.

    All shards of a folder have the same fields. Equal shards have equal bytes.
    """
    cuts = []
    fields: dict[str, list[tuple[str, np.ndarray, dict[str, Any]]]] = defaultdict(list)
    for row in rows:
        # Of whole frames, as lhotse compares a cut's duration with its features'.
        duration_s = round(len(row.features) * FRAME_SHIFT_S, 2)
        _require_member(row.utterance_id)
        cuts.append(_cut(row, duration_s))
        features = np.asarray(row.features, np.float32)
        fields["features"].append((row.utterance_id, features, _features(row, duration_s)))
        for name, array in _targets(row).items():
            shift_s = FRAME_SHIFT_S if name == "alignment" else STACK * FRAME_SHIFT_S
            shape = {"array": {**_IN_TAR, "shape": list(array.shape)}}
            manifest = {**shape, "temporal_dim": 0, "frame_shift": shift_s, "start": 0}
            fields[name].append((row.utterance_id, array, manifest))
    for name, values in fields.items():
        with tarfile.open(folder / f"{name}.{number:06d}.tar", "w") as archive:
            for key, array, manifest in values:
                data = io.BytesIO()
                np.save(data, array, allow_pickle=False)
                contents = ((".npy", data.getvalue()), (".json", json.dumps(manifest).encode()))
                for suffix, content in contents:
                    member = tarfile.TarInfo(f"{key}{suffix}")  # of 1970
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    lines = "".join(f"{json.dumps(cut, ensure_ascii=False)}\n" for cut in cuts)
    packed = gzip.compress(lines.encode(), mtime=0)
    (folder / f"cuts.{number:06d}.jsonl.gz").write_bytes(packed)


def _require_member(name: str) -> None:
    """Raise ValueError for an id that lhotse does not read back of a tar member's name."""
    path = PurePosixPath(f"{name}.npy")
    if str(path.parent / path.stem) != name:
        raise ValueError(f"{name!r}: lhotse reads another id from a tar: export to Kaldi archives")


def _targets(row: FeatureRow | PartitionRow) -> dict[str, np.ndarray]:
    if isinstance(row, FeatureRow):
        return {}
    if isinstance(row.targets, Alignment):
        return {"alignment": row.targets.senones.astype(np.int32)}
    kbest = at_offset(row.targets, row.offset)
    return {"senones": kbest.senones.astype(np.int32), "logits": kbest.logits, "log_z": kbest.log_z}


def _cut(row: FeatureRow | PartitionRow, duration_s: float) -> dict[str, Any]:
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


def _features(row: FeatureRow | PartitionRow, duration_s: float) -> dict[str, Any]:
    return {
        "type": "log_mel",
        "num_frames": len(row.features),
        "num_features": NUM_BINS,
        "frame_shift": FRAME_SHIFT_S,
        "sampling_rate": SAMPLE_RATE_HZ,
        "start": 0,
        "duration": duration_s,
        "recording_id": row.utterance_id,
        "channels": 0,
        **_IN_TAR,
    }
