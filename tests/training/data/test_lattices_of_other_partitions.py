"""Lattices that do not fit their partition are refused, with value, bound and remedy."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.manifest import Output
from pipeline.shards import LatticeRow, PartitionRow, write_lattices
from tests.training.sequence_training.toy_run import TREE, rows_of
from training.data.dataset import LatticeShards
from training.data.minibatch import BufferFrames
from training.data.row_order import Lengths
from training.sequence_training.lattice_decoder import LatticeArc, make_lattice
from training.sequence_training.smbr import Smbr

PARTITION = Output("alignments/partition.parquet", 0, "", 0, 0)
REMEDY = "remove the lattices' folder and run the training step again"
ROWS = rows_of(1)


def one_path(number: int, row: PartitionRow) -> LatticeRow:
    senones = row.targets.senones[1::3].tolist()
    arcs = [LatticeArc(frame, frame + 1, senone + 1, 0.0) for frame, senone in enumerate(senones)]
    lattice = make_lattice(arcs, 0, {len(senones): 0.0})
    return LatticeRow(row.utterance_id, row.duration_ms, number, lattice)


def shards(folder: Path, lattices: list[LatticeRow]) -> LatticeShards:
    store, run_uri = ObjectStore((str(folder),)), str(folder)
    context = step_context(store, run_uri, "lattices/baseline", {}, {})
    output = context.put_output("000000", ".parquet", write_lattices(lattices), Tally())
    criterion = Smbr(0.3, 0.0, np.zeros(TREE.num_senones))
    return LatticeShards(store, run_uri, {PARTITION.key: output}, criterion)


def put_beside(folder: Path, lattices: list[LatticeRow]) -> BufferFrames:
    numbers = np.arange(len(ROWS))
    return shards(folder, lattices).with_lattices(BufferFrames.of(ROWS, 0), PARTITION, numbers)


def test_rows_beyond_the_partition_are_refused(tmp_path: Path) -> None:
    """Row 2 is the last of three; training would leave out others in its place."""
    lattices = [one_path(2, ROWS[2])]
    counts = np.array([len(row.features) for row in ROWS])
    found = shards(tmp_path, lattices).only_decoded(PARTITION, Lengths(counts, 0 * counts))
    assert found.num_frames.tolist() == [0, 0, counts[2]]
    with pytest.raises(ValueError, match=f"000000.*: row 2: need rows of 2, .*{REMEDY}"):
        shards(tmp_path, lattices).only_decoded(PARTITION, Lengths(counts[:2], 0 * counts[:2]))


def test_labels_above_the_senones_are_refused(tmp_path: Path) -> None:
    """The last senone's label is the number of senones; one more has no output and no prior."""
    for label in (TREE.num_senones, TREE.num_senones + 1):
        row = one_path(0, ROWS[0])
        labels = row.lattice.labels.copy()
        labels[0] = label
        changed = [replace(row, lattice=replace(row.lattice, labels=labels))]
        if label == TREE.num_senones:
            put_beside(tmp_path, changed)
            continue
        need = f"row 0: label {label}: need labels to {TREE.num_senones}, .*{REMEDY}"
        with pytest.raises(ValueError, match=need):
            put_beside(tmp_path, changed)


def test_other_numbers_of_frames_are_refused(tmp_path: Path) -> None:
    """A lattice of another utterance, by its frames."""
    frames = [len(row.features) // 3 for row in ROWS]
    other = next(n for n in range(1, len(ROWS)) if frames[n] != frames[0])
    put_beside(tmp_path, [one_path(0, ROWS[0])])
    need = f"row 0: {frames[other]} frames: need {frames[0]} low-rate frames, .*{REMEDY}"
    with pytest.raises(ValueError, match=need):
        put_beside(tmp_path, [one_path(0, ROWS[other])])
