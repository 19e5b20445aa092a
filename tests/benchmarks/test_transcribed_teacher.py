"""A teacher that knows some transcripts labels these speakers truly, and others by its model."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.benchmarks.rotation.transcribed_teacher import (
    SURE_LOGIT,
    TranscribedTeacher,
    frames_digest,
    is_transcribed,
)

KNOWN, OTHER = torch.ones(4, 192), torch.zeros(3, 192)


def test_known_frames_have_their_aligned_senones() -> None:
    """Their probability is all but one; other frames have the model's logits as they are."""
    senones = np.array([2, 0, 4, 4], np.uint16)
    model_logits = torch.arange(15.0).reshape(3, 5)
    teacher = TranscribedTeacher(
        {frames_digest(KNOWN.numpy()): senones}, lambda frames: [model_logits for _ in frames], 5
    )
    known, other = teacher([KNOWN, OTHER])
    assert known.argmax(dim=1).tolist() == senones.tolist()
    assert known.max() == SURE_LOGIT
    assert torch.softmax(known, dim=1).amax(dim=1).min() > 1 - 1e-7
    assert torch.equal(other, model_logits)


@given(st.text(min_size=1), st.floats(0, 1), st.floats(0, 1))
def test_shares_contain_each_other(speaker_id: str, one: float, other: float) -> None:
    """More transcripts are those of fewer, and some more; none and all are what they say."""
    few, many = sorted((one, other))
    assert is_transcribed(speaker_id, few) <= is_transcribed(speaker_id, many)
    assert not is_transcribed(speaker_id, 0.0)
    assert is_transcribed(speaker_id, 1.0)
