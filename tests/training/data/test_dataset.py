"""A dataset gives each frame once, whatever the ranks, shares and shuffle buffers."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.manifest import Output
from pipeline.shards import LatticeRow, PartitionRow, write_lattices
from tests.training.data.partition_rows import dataset_in, row
from tests.training.sequence_training.toy_run import TREE, rows_of
from training.data import row_order
from training.data.dataset import Dataset, LatticeShards
from training.data.minibatch import BufferFrames, Minibatch
from training.data.row_order import Lengths
from training.data.sub_epochs import SubEpoch
from training.sequence_training.lattice_paths import LatticeArc, make_lattice
from training.sequence_training.smbr import Smbr


def sub_epoch(
    labelled: bool = True, share: int = 0, num_shares: int = 1, whole: bool = False
) -> SubEpoch:
    return SubEpoch(labelled, share, num_shares, 0, whole, 0.1)


NUM_PARTITIONS = 24
FRAME_COUNTS = [10 * (number % 7) + number % 5 for number in range(4 * NUM_PARTITIONS)]
"""Utterances of 0 to 64 frames, four in each partition; the number is what features show."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """One rank's view of 24 small partitions of each kind."""
    kinds = [
        [
            [row(number, FRAME_COUNTS[number], soft) for number in range(first, first + 4)]
            for first in range(0, len(FRAME_COUNTS), 4)
        ]
        for soft in (False, True)
    ]
    folder = tmp_path_factory.mktemp("dataset")
    return dataset_in(folder, labelled=kinds[0], unlabelled=kinds[1])


def frames_seen(batch: Minibatch) -> Counter[tuple[int, int]]:
    """Utterance and 10 ms frame that begins each low-rate frame, the look-ahead's included."""
    seen: Counter[tuple[int, int]] = Counter()
    for segment, length in zip(batch.features, batch.lengths.tolist(), strict=True):
        for frame in segment[:length]:
            seen[int(frame[1]), int(frame[0])] += 1
    return seen


def frames_once(labelled: bool, num_partitions: int) -> Counter[tuple[int, int]]:
    """Every low-rate frame of the first partitions once, its utterance's last four times."""
    expected: Counter[tuple[int, int]] = Counter()
    for number, count in enumerate(FRAME_COUNTS[: 4 * num_partitions]):
        offset = 0 if labelled else number % 3
        starts = [offset + 3 * step for step in range((count - offset) // 3)]
        expected.update((number, start) for start in [*starts, *starts[-1:] * 3])
    return expected


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, NUM_PARTITIONS),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
    st.sampled_from([40, 200, 240_000]),
)
def test_all_ranks_and_shares_together_see_every_frame_once(
    whole, num_partitions, world_size, num_shares, labelled, utterances, buffer_frames
) -> None:
    """Whatever the numbers of partitions, ranks, shares and shuffle buffers, and in both forms."""
    dataset = replace(
        whole,
        labelled=whole.labelled[:num_partitions],
        unlabelled=whole.unlabelled[:num_partitions],
        world_size=world_size,
    )
    seen: Counter[tuple[int, int]] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_order, "BUFFER_FRAMES", buffer_frames)
        for share in range(num_shares):
            for rank in range(world_size):
                chosen = sub_epoch(labelled, share, num_shares, utterances)
                plan = replace(dataset, rank=rank).plan(chosen, index=share)
                batches = list(plan.minibatches())
                assert len(batches) == plan.num_minibatches()
                seen += sum(map(frames_seen, batches), Counter())
    assert seen == frames_once(labelled, num_partitions)


def test_the_same_sub_epoch_reads_the_same_minibatches_again(whole: Dataset) -> None:
    """A resumed sub-epoch is bitwise the interrupted one; another sub-epoch has another order."""
    first, again, other = (
        torch.cat([b.features.flatten() for b in whole.plan(sub_epoch(), index).minibatches()])
        for index in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_utterances_too_short_for_a_low_rate_frame_are_no_minibatch(tmp_path: Path) -> None:
    """Nothing is left of them at offset 2, look-ahead or not, and nothing is read ahead."""
    short = dataset_in(tmp_path, labelled=[[row(number, 4) for number in range(3)]])
    for utterances in (False, True):
        plan = short.plan(SubEpoch(True, 0, 1, 2, utterances, 0.1), 0)
        assert plan.num_minibatches() == 0
        ahead = [short.read(each) for each, _ in plan.pieces[:1]]
        assert list(plan.minibatches(first=ahead)) == []
    assert np.sum([b.num_frames for b in short.plan(sub_epoch(), 0).minibatches()]) == 3


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
