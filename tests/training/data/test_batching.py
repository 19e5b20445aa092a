"""Chunks and whole utterances: every frame once, whatever the lengths."""

from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from training.data.row_order import (
    BUFFER_FRAMES,
    CHUNK_FRAMES,
    Segments,
    chunked_minibatches,
    group_into_buffers,
    whole_utterance_minibatches,
)

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
