"""Rows are dealt to ranks and shares, cut into minibatches, and left out for validation."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_BINS
from pipeline.records import Tally, version_id
from pipeline.runs.commit import step_context
from pipeline.runs.manifest import Output
from pipeline.runs.names import ALIGNMENT_STEP, DEV_ALIGNMENT_STEP
from pipeline.shards import Alignment, PartitionRow, read_partition, write_partition
from training.data.dataset import Dataset
from training.data.row_order import (
    BUFFER_FRAMES,
    CHUNK_FRAMES,
    Segments,
    chunked_minibatches,
    group_into_buffers,
    one_of,
    shard_partitions,
    whole_utterance_minibatches,
)
from training.data.sub_epochs import SubEpoch


def slices_of(num_outputs: int, share: int, num_shares: int, world_size: int) -> list[list]:
    """Return the slices of each rank."""
    outputs = [Output(str(number), 0, "", 0, 0) for number in range(num_outputs)]
    sub_epoch = SubEpoch(True, share, num_shares, 0, False, 0.1)
    ranks = range(world_size)
    return [shard_partitions(outputs, sub_epoch, rank, world_size) for rank in ranks]


def rows_of(ranks: list[list]) -> Counter:
    """Count each of the 50 rows of the slices' partitions."""
    slices = [part for each in ranks for part in each]
    return Counter(
        (part.output.key, number)
        for part in slices
        for number in range(50)[part.first :: part.step]
    )


@settings(deadline=None)
@given(st.integers(1, 120), st.integers(1, 5), st.integers(1, 5), st.integers(1, 7))
def test_every_row_is_in_one_share_on_one_rank(
    num_outputs: int, world_size: int, other_size: int, num_shares: int
) -> None:
    """Each of a partition's 50 rows is once in all shares, and in the same on any ranks."""
    found = Counter[tuple[str, int]]()
    for share in range(num_shares):
        rows = rows_of(slices_of(num_outputs, share, num_shares, world_size))
        assert rows == rows_of(slices_of(num_outputs, share, num_shares, other_size))
        found += rows
    assert set(found.values()) == {1}
    assert len(found) == 50 * num_outputs


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 9), st.integers(1, 9))
def test_ranks_read_few_partitions_for_what_they_use(
    num_outputs: int, world_size: int, num_shares: int
) -> None:
    """Whole partitions from four a part on; else at most 20 slices, and ranks have as much."""
    ranks = slices_of(num_outputs, 0, num_shares, world_size)
    used = [sum(1 / part.step for part in slices) for slices in ranks]
    assert all(len({part.output.key for part in slices}) == len(slices) for slices in ranks)
    if num_outputs >= 4 * num_shares * world_size:
        assert {part.step for slices in ranks for part in slices} == {1}
    else:
        assert max(map(len, ranks)) <= 20
        assert max(used) / min(used) < 1 + 1 / 8
    # Shares of 4 to 5 whole partitions are within a quarter of each other.
    assert abs(sum(used) * num_shares / num_outputs - 1) < 1 / 4


LENGTHS = st.lists(st.integers(0, 300), min_size=1, max_size=40).map(
    lambda lengths: np.array(lengths, np.int64)
)


def spans(batch: Segments) -> list[tuple[int, int, int]]:
    """Return utterance, start and stop of each segment."""
    columns = (batch.utterances, batch.starts, batch.stops)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@given(LENGTHS, st.sampled_from([chunked_minibatches, whole_utterance_minibatches]))
def test_every_frame_is_in_exactly_one_minibatch(lengths, form) -> None:
    """Both forms cover all frames of all utterances once."""
    batches = form(lengths, 320, np.random.default_rng(0))
    frames = Counter(
        (utterance, frame)
        for batch in batches
        for utterance, start, stop in spans(batch)
        for frame in range(start, stop)
    )
    assert set(frames.values()) <= {1}
    assert len(frames) == lengths.sum()


@given(LENGTHS)
def test_chunks_have_the_papers_length(lengths) -> None:
    """32 frames, fewer only at an utterance's end."""
    for batch in chunked_minibatches(lengths, 320, np.random.default_rng(0)):
        assert len(batch.utterances) <= 10
        for utterance, start, stop in spans(batch):
            assert stop - start == CHUNK_FRAMES or stop == lengths[utterance]


@given(LENGTHS)
def test_whole_utterances_stay_within_the_padded_size(lengths) -> None:
    """Utterances times the longest fits the minibatch, unless one alone does not."""
    for batch in whole_utterance_minibatches(lengths, 320, np.random.default_rng(0)):
        padded = len(batch.stops) * batch.stops.max()
        assert padded <= 320 or len(batch.stops) == 1


@given(st.lists(st.integers(0, BUFFER_FRAMES * 2), max_size=20))
def test_shuffle_buffers_are_consecutive_and_cover_all(lengths: list[int]) -> None:
    """Each part is in one buffer, in order; a buffer has the parts that begin within its frames."""
    buffers = list(group_into_buffers(range(len(lengths)), lengths.__getitem__))
    assert [number for buffer in buffers for number in buffer] == list(range(len(lengths)))
    begins = np.cumsum([0, *lengths])[: len(lengths)] // BUFFER_FRAMES
    assert len(buffers) == len(set(begins.tolist()))
    assert all(len(set(begins[buffer].tolist())) == 1 for buffer in buffers)


def test_a_shuffle_buffer_needs_no_lengths_beyond_the_next_ones_first() -> None:
    """The beginning of a sub-epoch can be looked at without reading the lengths of all of it."""
    unread = iter([BUFFER_FRAMES, BUFFER_FRAMES, 1, 1])
    assert next(group_into_buffers(unread, int)) == [BUFFER_FRAMES]
    assert len(list(unread)) == 2


TRAINING = SubEpoch(True, 0, 1, 0, True, 0.1)
VALIDATION = SubEpoch(True, 0, 1, 0, True, 0.0, is_validation=True)


def put(
    store: ObjectStore,
    run_uri: str,
    step: str,
    speakers: list[list[str]],
    placements: Sequence[str | None] = (None,),
) -> list[Output]:
    """Store a partition for each list, with an utterance of nine frames for each speaker in it.

    It is there in each of the placements.
    """
    context = step_context(store, run_uri, step, {}, {})
    frames, targets = np.zeros((9, NUM_BINS), np.float16), Alignment(np.zeros(9, np.uint16))
    return [
        context.put_output(
            f"{number:06d}",
            ".parquet",
            write_partition(
                [
                    PartitionRow(
                        version_id(f"{number}-{row}", placement)
                        if placement
                        else f"{number}-{row}",
                        speaker,
                        90,
                        None,
                        frames,
                        targets,
                        0,
                        placement=placement,
                    )
                    for row, speaker in enumerate(some)
                    for placement in placements
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


def test_one_name_is_left_out_at_least_and_never_the_only_one() -> None:
    """One in n, rounded down, but one where there are two; nothing depends on order or repeats."""
    names = [f"s{number}" for number in range(45)]
    assert len(one_of(names, 20)) == 2
    assert len(one_of(names[:19], 20)) == 1
    assert len(one_of(names[:2], 2)) == 1
    assert one_of(names[:1], 2) == []
    assert one_of([*names[::-1], *names], 5) == one_of(names, 5)


def test_of_a_single_speaker_utterances_are_left_out(run: tuple[ObjectStore, str]) -> None:
    """Where nothing else can be: none is trained on in another placement."""
    labelled = put(*run, ALIGNMENT_STEP, [["ann"] * 4, ["ann"] * 3], ("clean", "DP1"))
    dataset = dataset_of(*run, labelled)
    validated, trained = (
        {name for name, _ in heard(dataset, each)} for each in (VALIDATION, TRAINING)
    )
    assert (len(validated), len(trained)) == (4, 10)
    sources = [{name.rpartition("-")[0] for name in some} for some in (validated, trained)]
    assert not sources[0] & sources[1]
