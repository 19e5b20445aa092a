"""Lattices beside the labelled training partitions, for sequence training (003 VII-C3)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Int64

from infra.store.object_store import ObjectStore, join_uri, scan_checked
from pipeline.runs.manifest import Output, read_output
from pipeline.shards import Lattice, read_lattice_rows, read_lattices
from training.data.minibatch import BufferFrames
from training.data.sharding import Lengths
from training.sequence_training.smbr import Smbr
from training.targets.hard import HardTargetRows
from training.targets.sequence import SequenceTargetRows


@dataclass(frozen=True, slots=True)
class LatticeShards:
    """LatticeShards: the lattice shard of each labelled partition, by the partition's key."""

    store: ObjectStore
    run_uri: str
    outputs: Mapping[str, Output]
    criterion: Smbr

    def only_decoded(self, partition: Output, lengths: Lengths) -> Lengths:
        """Return the lengths with 0 for rows without lattice, which training leaves out."""
        rows = self.decoded_rows(partition)
        num_rows = len(lengths.num_frames)
        if len(rows) and rows[-1] >= num_rows:
            raise self._mismatch(partition, f"row {rows[-1]}", f"rows of {num_rows}")
        num_frames = np.zeros_like(lengths.num_frames)
        num_frames[rows] = lengths.num_frames[rows]
        return replace(lengths, num_frames=num_frames)

    def with_lattices(
        self, frames: BufferFrames, partition: Output, rows: Int64[np.ndarray, " utterances"]
    ) -> BufferFrames:
        """Put the lattices of a partition's `rows` beside the labels of their frames."""
        decoded = self.decoded_rows(partition)
        places = np.flatnonzero(np.isin(decoded, rows))
        data = read_output(self.store, self.run_uri, self.outputs[partition.key])
        found: dict[int, Lattice] = {
            each.row: each.lattice for each in read_lattices(data, places.tolist())
        }
        assert isinstance(frames.targets, HardTargetRows), "labelled partitions have alignments"
        lattices = [found.get(row) for row in rows.tolist()]
        for row, lattice, count in zip(rows, lattices, frames.counts, strict=True):
            if lattice is not None:
                self._check(partition, f"row {row}", lattice, int(count))
        targets = SequenceTargetRows.of(
            frames.targets, frames.firsts, frames.counts, lattices, self.criterion
        )
        return replace(frames, targets=targets)

    def _check(self, partition: Output, row: str, lattice: Lattice, num_frames: int) -> None:
        """Raise ValueError for a lattice of other senones, or of another number of frames."""
        num_senones = len(self.criterion.log_priors)
        label = int(lattice.labels.max())
        if label > num_senones:
            raise self._mismatch(partition, f"{row}: label {label}", f"labels to {num_senones}")
        if lattice.num_frames != num_frames:
            found = f"{row}: {lattice.num_frames} frames"
            raise self._mismatch(partition, found, f"{num_frames} low-rate frames")

    def _mismatch(self, partition: Output, found: str, need: str) -> ValueError:
        uri = join_uri(self.run_uri, self.outputs[partition.key].key)
        return ValueError(
            f"{uri}: {found}: need {need}, as {partition.key} and its senones have: remove the "
            "lattices' folder and run the training step again, which decodes them"
        )

    def decoded_rows(self, partition: Output) -> Int64[np.ndarray, " lattices"]:
        """Read the numbers of the partition's rows that have a lattice, in stored order."""
        uri = join_uri(self.run_uri, self.outputs[partition.key].key)
        return scan_checked(self.store, uri, read_lattice_rows)
