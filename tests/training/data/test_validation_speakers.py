"""Newbob's validation leaves out speakers: no voice is on both sides."""

import numpy as np
import pytest

from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.manifest import Output
from pipeline.runs.names import ALIGNMENT_STEP, DEV_ALIGNMENT_STEP
from pipeline.shards import Alignment, PartitionRow, read_partition, write_partition
from training.data.dataset import Dataset
from training.data.row_order import validation_speakers
from training.data.sub_epochs import SubEpoch

TRAINING = SubEpoch(True, 0, 1, 0, True, 0.1)
VALIDATION = SubEpoch(True, 0, 1, 0, True, 0.0, is_validation=True)


def put(store: ObjectStore, run_uri: str, step: str, speakers: list[list[str]]) -> list[Output]:
    """Store a partition for each list, with an utterance of nine frames for each speaker in it."""
    context = step_context(store, run_uri, step, {}, {})
    frames, targets = np.zeros((9, 64), np.float16), Alignment(np.zeros(9, np.uint16))
    return [
        context.put_output(
            f"{number:06d}",
            ".parquet",
            write_partition(
                [
                    PartitionRow(f"{number}-{row}", speaker, 90, None, frames, targets, 0)
                    for row, speaker in enumerate(some)
                ]
            ),
            Tally(len(some), 90 * len(some)),
        )
        for number, some in enumerate(speakers)
    ]


def dataset_of(store: ObjectStore, run_uri: str, labelled: list[Output], **changes) -> Dataset:
    settings = {"rank": 0, "world_size": 1, "validation_one_in": 3, **changes}
    return Dataset(store, run_uri, tuple(labelled), (), 0, 1000, 1, **settings)


def heard(dataset: Dataset, sub_epoch: SubEpoch) -> list[tuple[str, str]]:
    """Return the utterances and speakers of a sub-epoch."""
    return [
        (row.utterance_id, row.speaker_id)
        for buffer in dataset.shuffle_buffers(sub_epoch, 0)
        for part in buffer.parts
        for row in read_partition(
            dataset.store.get(f"{dataset.run_uri}/{part.output.key}"), part.rows.tolist()
        )
    ]


@pytest.fixture
def run(tmp_path) -> tuple[ObjectStore, str]:
    return ObjectStore((str(tmp_path),)), str(tmp_path)


PARTITIONS = [["ann", "bob", "ann", "cid"], ["dan", "bob", "eve", "fay", "eve"]]


def test_no_speaker_is_on_both_sides(run: tuple[ObjectStore, str]) -> None:
    """Of six speakers two are left out, whole; each utterance is trained or validated on, once."""
    labelled = put(*run, ALIGNMENT_STEP, PARTITIONS)
    dataset = dataset_of(*run, labelled)
    trained, validated = heard(dataset, TRAINING), heard(dataset, VALIDATION)
    voices = [{speaker for _, speaker in some} for some in (trained, validated)]
    assert not voices[0] & voices[1]
    assert (len(voices[0]), len(voices[1])) == (4, 2)
    everything = {name for some in (trained, validated) for name, _ in some}
    assert len(trained) + len(validated) == len(everything) == 9


def test_all_ranks_leave_out_the_same_speakers(run: tuple[ObjectStore, str]) -> None:
    """Ranks share the training utterances and the others; none has both of one speaker."""
    labelled = put(*run, ALIGNMENT_STEP, PARTITIONS)
    whole = [heard(dataset_of(*run, labelled), each) for each in (TRAINING, VALIDATION)]
    ranks = [dataset_of(*run, labelled, rank=rank, world_size=2) for rank in range(2)]
    for each, expected in zip((TRAINING, VALIDATION), whole, strict=True):
        parts = [row for dataset in ranks for row in heard(dataset, each)]
        assert sorted(parts) == sorted(expected)


def test_development_speakers_replace_them(run: tuple[ObjectStore, str]) -> None:
    """With partitions of development speakers, training loses no labelled utterance."""
    labelled = put(*run, ALIGNMENT_STEP, PARTITIONS)
    development = tuple(put(*run, DEV_ALIGNMENT_STEP, [["gus", "hal"]]))
    dataset = dataset_of(*run, labelled, development=development)
    assert len(heard(dataset, TRAINING)) == 9
    assert {speaker for _, speaker in heard(dataset, VALIDATION)} == {"gus", "hal"}


def test_one_speaker_is_left_out_at_least_and_never_the_only_one() -> None:
    """One in n, rounded down, but one where there are two; nothing depends on order or repeats."""
    names = [f"s{number}" for number in range(45)]
    assert len(validation_speakers(names, 20)) == 2
    assert len(validation_speakers(names[:19], 20)) == 1
    assert len(validation_speakers(names[:2], 2)) == 1
    assert validation_speakers(names[:1], 2) == []
    assert validation_speakers([*names[::-1], *names], 5) == validation_speakers(names, 5)


def test_of_a_single_speaker_utterances_are_left_out(run: tuple[ObjectStore, str]) -> None:
    """Rows 0, n, 2n, ... of each partition are left out where nothing else can be."""
    labelled = put(*run, ALIGNMENT_STEP, [["ann"] * 7])
    dataset = dataset_of(*run, labelled)
    assert {name for name, _ in heard(dataset, VALIDATION)} == {"0-0", "0-3", "0-6"}
    assert len(heard(dataset, TRAINING)) == 4
