"""Kaldi's binary archives of features, alignments and posteriors, with their scp files.

A folder of them is a Kaldi data directory: `feats.scp`, `utt2spk`, `text`, `utt2dur`, and
`ali.scp` or `post.scp` of targets.
"""

import re
import struct
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Shaped

from pipeline.kbest import best_probabilities
from pipeline.shards.features import FeatureRow
from pipeline.shards.partitions import Alignment, PartitionRow
from pipeline.shards.targets import KBestAtAllOffsets

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
        self._folder = folder
        self._lines: dict[str, dict[str, str]] = defaultdict(dict)

    def write_shard(self, number: int, rows: Sequence[FeatureRow | PartitionRow]) -> None:
        """Write one shard's archives: features at 100 Hz, alignments too, posteriors at 33 Hz."""
        contents: dict[str, dict[str, bytes]] = defaultdict(dict)
        for row in rows:
            key = _key(row.utterance_id)
            contents["feats"][key] = matrix_bytes(row.features.astype(np.float32))
            self._describe(key, row)
            if isinstance(row, FeatureRow):
                continue
            if isinstance(row.targets, Alignment):
                contents["ali"][key] = alignment_bytes(row.targets.senones)
                continue
            own = row.targets
            kbest = own.at(row.offset) if isinstance(own, KBestAtAllOffsets) else own
            probabilities = best_probabilities(kbest)
            contents["post"][key] = posterior_bytes(
                kbest.senones[:, : kbest.num_best], probabilities
            )
            self._lines["utt2offset"][key] = str(row.offset)
        for kind, values in contents.items():
            self._write_archive(kind, number, values)

    def finish(self) -> None:
        """Write the scp files and lists in the order of bytes, as Kaldi wants them."""
        for name, lines in self._lines.items():
            ordered = sorted(lines.items(), key=lambda each: each[0].encode())
            text = "".join(f"{key} {value}".rstrip() + "\n" for key, value in ordered)
            (self._folder / name).write_text(text, encoding="utf-8")

    def _describe(self, key: str, row: FeatureRow | PartitionRow) -> None:
        self._lines["utt2spk"][key] = _key(row.speaker_id)
        self._lines["utt2dur"][key] = f"{row.duration_ms / 1000:.3f}"
        if row.text is not None:
            self._lines["text"][key] = row.text

    def _write_archive(self, kind: str, number: int, values: dict[str, bytes]) -> None:
        path = self._folder / f"{kind}.{number:06d}.ark"
        with path.open("wb") as file:
            for key, data in values.items():
                file.write(f"{key} ".encode())
                self._lines[f"{kind}.scp"][key] = f"{path}:{file.tell()}"
                file.write(data)


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
