"""Rows on local disk, so that a task's memory does not grow with the shards that it mixes."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from tempfile import TemporaryFile

import numpy as np

from infra.spark.task_resources import local_folder
from pipeline.kbest import KBest
from pipeline.shards import Alignment, KBestAtAllOffsets, PartitionRow, stored_rows


@dataclass(frozen=True, slots=True)
class _Spilled:
    """A row whose tensors are empty, and where on disk they are, one after the other."""

    row: PartitionRow
    first_byte: int
    lengths: tuple[int, ...]


class SpilledRows:
    """Rows of k-best targets whose tensors lie in an unnamed file, which ends with the process."""

    def __init__(self) -> None:
        self._file = TemporaryFile(dir=local_folder())  # noqa: SIM115 - closed when we are collected
        self._rows: list[_Spilled] = []

    def extend(self, rows: Iterable[PartitionRow]) -> None:
        """Move rows to disk."""
        for row in rows:
            arrays = _tensors(row)
            first_byte = self._file.tell()
            for array in arrays:
                self._file.write(array.tobytes())
            empty = [np.empty((0, *array.shape[1:]), array.dtype) for array in arrays]
            lengths = tuple(len(array) for array in arrays)
            self._rows.append(_Spilled(_with_tensors(row, empty), first_byte, lengths))
        self._file.flush()

    @property
    def durations_ms(self) -> list[int]:
        """The rows' declared durations, in the order of arrival."""
        return [spilled.row.duration_ms for spilled in self._rows]

    def load(self, number: int) -> PartitionRow:
        """Read one row back."""
        spilled = self._rows[number]
        arrays, first_byte = [], spilled.first_byte
        for empty, length in zip(_tensors(spilled.row), spilled.lengths, strict=True):
            shape = (length, *empty.shape[1:])
            num_bytes = int(np.prod(shape)) * empty.itemsize
            data = os.pread(self._file.fileno(), num_bytes, first_byte)
            arrays.append(np.frombuffer(data, empty.dtype).reshape(shape))
            first_byte += num_bytes
        return _with_tensors(spilled.row, arrays)


def _tensors(row: PartitionRow) -> tuple[np.ndarray, ...]:
    assert not isinstance(row.targets, Alignment), "only rows with soft targets are spilled"
    kbest = stored_rows(row.targets)
    return row.features, kbest.senones, kbest.logits, kbest.log_z


def _with_tensors(row: PartitionRow, arrays: Sequence[np.ndarray]) -> PartitionRow:
    assert not isinstance(row.targets, Alignment), "only rows with soft targets are spilled"
    features, *columns = arrays
    kbest = KBest(*columns, tail_samples=stored_rows(row.targets).tail_samples)
    is_at_all = isinstance(row.targets, KBestAtAllOffsets)
    return replace(row, features=features, targets=KBestAtAllOffsets(kbest) if is_at_all else kbest)
