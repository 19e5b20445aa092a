"""Training partitions to minibatches: dealt once, delayed by the look-ahead, padded."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from infra.object_store import ObjectStore
from pipeline.kbest import select_kbest
from pipeline.records import Tally
from pipeline.shards import PartitionRow, write_partition
from pipeline.steps.commit import StepContext
from pipeline.steps.manifest import Output
from training.batching import Piece
from training.dataset import Dataset, Example, collate, deal, to_example
from training.schedule import Visit


def visit(labelled: bool = True, share: int = 0, num_shares: int = 1, offset: int = 0) -> Visit:
    return Visit(labelled, share, num_shares, offset, False, 0.1)


def row(number: int, num_frames: int, soft: bool = False) -> PartitionRow:
    features = np.full((num_frames, 64), number, np.float16)
    features[:, 0] = np.arange(num_frames)
    offset = number % 3
    logits = np.random.default_rng(number).normal(size=((num_frames - offset) // 3, 9))
    return PartitionRow(
        utterance_id=f"utterance-{number}",
        speaker_id="speaker",
        duration_ms=num_frames * 10,
        text=None,
        features=features,
        alignment=None if soft else np.arange(num_frames, dtype=np.uint16),
        offset=offset if soft else 0,
        kbest=select_kbest(logits.astype(np.float32), 4) if soft else None,
    )


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 4))
def test_every_row_is_dealt_exactly_once(
    num_outputs: int, world_size: int, num_shares: int
) -> None:
    """Over all shares and ranks, each of a partition's 50 rows belongs to one slice."""
    outputs = [Output(str(number), 0, "", 0, 0) for number in range(num_outputs)]
    dealt = Counter(
        (part.output.key, number)
        for share in range(num_shares)
        for rank in range(world_size)
        for part in deal(
            outputs, visit(share=share, num_shares=num_shares), rank, world_size, range(num_outputs)
        )
        for number in range(50)[part.first :: part.step]
    )
    assert set(dealt.values()) == {1}
    assert len(dealt) == 50 * num_outputs


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_hard_labels_are_those_of_the_middle_frame_and_come_late(offset: int) -> None:
    """Output t speaks of low-rate frame t - 3, labelled at 10 ms frame offset + 3t + 1."""
    example = to_example(row(0, 20), offset, look_ahead=3)
    num_frames = (20 - offset) // 3
    assert example.labels is not None
    assert example.labels[:3].tolist() == [-1, -1, -1]
    expected = [offset + 3 * frame + 1 for frame in range(num_frames)]
    assert example.labels[3:].tolist() == expected
    assert example.features[:num_frames, 0].tolist() == [offset + 3 * f for f in range(num_frames)]
    np.testing.assert_array_equal(example.features[-3:], example.features[[num_frames - 1] * 3])


def test_soft_targets_use_the_stored_offset() -> None:
    """The visit's offset does not matter to rows that carry the teacher's."""
    stored = row(2, 20, soft=True)
    example = to_example(stored, visit_offset=0, look_ahead=0)
    assert example.features[0, 0] == 2
    assert stored.kbest is not None
    np.testing.assert_array_equal(example.senones, stored.kbest.senones)


def test_padding_has_no_label() -> None:
    """The shorter piece ends in -1 and zeros."""
    examples = [
        Example(np.ones((length, 192), np.float16), np.arange(length), None, None)
        for length in (2, 4)
    ]
    batch = collate(examples, [Piece(0, 0, 2), Piece(1, 1, 4)])
    assert batch.labels is not None
    assert batch.labels.tolist() == [[0, 1, -1], [1, 2, 3]]
    assert batch.lengths.tolist() == [2, 3]
    assert batch.num_frames == 5
    assert not batch.features[0, 2].any()


def dataset(folder: Path, rank: int, world_size: int, seed: int = 5) -> Dataset:
    store = ObjectStore((str(folder),))
    context = StepContext(store, str(folder), "partitions/unlabelled", "")
    outputs = []
    for soft in (False, True):
        part = [row(number, 20 + 7 * number, soft) for number in range(11)]
        tally = Tally(len(part), 0)
        outputs.append(context.put_output(f"soft-{soft}", ".parquet", write_partition(part), tally))
    return Dataset(store, str(folder), (outputs[0],), (outputs[1],), 3, 64, seed, rank, world_size)


@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_all_ranks_together_see_every_frame_once(
    tmp_path: Path, labelled: bool, whole: bool
) -> None:
    """The frames of three ranks' minibatches are those of the data, look-ahead included."""
    chosen = Visit(labelled, 0, 1, 1, whole, 0.1)
    seen = 0
    for rank in range(3):
        plan = dataset(tmp_path, rank, 3).plan(chosen, index=4)
        batches = list(plan.minibatches())
        assert len(batches) == plan.num_minibatches()
        seen += sum(batch.num_frames for batch in batches)
    offsets = [1 if labelled else number % 3 for number in range(11)]
    assert seen == sum((20 + 7 * n - offset) // 3 + 3 for n, offset in enumerate(offsets))


def test_the_same_visit_reads_the_same_minibatches_again(tmp_path: Path) -> None:
    """A resumed visit is bitwise the interrupted one; another visit has another order."""
    first, again, other = (
        torch.cat(
            [b.features.flatten() for b in dataset(tmp_path, 0, 1).plan(visit(), i).minibatches()]
        )
        for i in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
