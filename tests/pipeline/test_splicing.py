import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.filterbank import NUM_BINS, NUM_INPUTS
from pipeline.splicing import low_rate_alignment, num_low_rate_frames, splice

NUM_FRAMES, OFFSETS = st.integers(0, 40), st.integers(0, 2)


@given(NUM_FRAMES, OFFSETS)
def test_row_t_is_three_frames_side_by_side(num_frames: int, offset: int) -> None:
    """Row t = frames o + 3t, o + 3t + 1, o + 3t + 2, as long as all three exist."""
    frames = np.arange(num_frames * NUM_BINS, dtype=np.float32).reshape(num_frames, NUM_BINS)
    expected = [
        np.concatenate(frames[first : first + 3])
        for first in range(offset, num_frames, 3)
        if first + 3 <= num_frames
    ]
    spliced = splice(frames, offset)
    assert spliced.shape == (num_low_rate_frames(num_frames, offset), NUM_INPUTS)
    assert spliced.tolist() == [row.tolist() for row in expected]


@given(OFFSETS)
def test_the_offsets_are_views_of_the_same_frames(offset: int) -> None:
    """Three offsets need no copies."""
    frames = np.zeros((20, NUM_BINS), dtype=np.float16)
    assert np.shares_memory(splice(frames, offset), frames)


@given(NUM_FRAMES, OFFSETS)
def test_a_row_is_labelled_by_its_middle_frame(num_frames: int, offset: int) -> None:
    """There is one label a row, the alignment at the row's second frame."""
    frames = np.arange(num_frames, dtype=np.float32)[:, np.newaxis]
    labels = low_rate_alignment(np.arange(num_frames), offset)
    assert labels.tolist() == splice(frames, offset)[:, 1].tolist()


@pytest.mark.parametrize("offset", [-1, 3])
def test_there_are_three_offsets(offset: int) -> None:
    """An offset outside 0..2 is refused, naming the bound."""
    with pytest.raises(ValueError, match=r"need 0\.\.2"):
        num_low_rate_frames(10, offset)
