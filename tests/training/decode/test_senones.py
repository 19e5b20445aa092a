"""Check phone segments, and the senones of both frame rates."""

import numpy as np
import pytest

from tests.training.decode.toy_language import toy_speech, toy_tree
from training.decode.senones import PhoneAlignment, expand_to_frames, senone_alignment


def test_context_crosses_words_and_is_silence_at_the_edges() -> None:
    """A phone's context is its neighbours in the utterance, and silence beyond it."""
    alignment = PhoneAlignment(np.array([3, 5, 4], np.int32), np.array([0, 2, 6], np.int32), 9)
    assert alignment.durations.tolist() == [2, 4, 3]
    assert alignment.triphones.tolist() == [[0, 3, 5], [3, 5, 4], [5, 4, 0]]


def test_senones_follow_the_tree_frame_by_frame() -> None:
    """Every frame has the leaf of its own triphone."""
    tree, alignment = toy_tree(), toy_speech(1)[1]["utterance-0"]
    senones = senone_alignment(alignment, tree)
    assert senones.dtype == np.uint16
    assert len(senones) == alignment.num_frames
    for segment, start in enumerate(alignment.starts):
        assert senones[start] == tree.senone(*alignment.triphones[segment].tolist())


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_expanding_inverts_the_low_rate_view(offset: int) -> None:
    """`alignment[offset + 1 :: 3]` of the expanded senones gives them back."""
    senones = np.arange(20, dtype=np.int64)
    frames = expand_to_frames(senones, offset, 64)
    assert len(frames) == 64
    np.testing.assert_array_equal(frames[offset + 1 :: 3][:20], senones)
