"""Windows over long utterances: every frame is labelled once, with the overlap on either side."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.models.lstm import LstmModel
from training.settings.decoding import WindowsConfig
from training.settings.models import LstmConfig
from training.targets.teacher import windows


@given(st.integers(0, 500), st.integers(3, 60), st.integers(0, 29))
def test_each_frame_is_labelled_once(num_frames: int, window: int, overlap: int) -> None:
    """In order; no window is longer than the bound, and cuts hear the whole overlap."""
    config = WindowsConfig(window, min(overlap, (window - 1) // 2))
    cut = windows(num_frames, config)
    assert [frame for each in cut for frame in each.labelled] == list(range(num_frames))
    for each in cut:
        assert len(each.heard) <= window
        assert list(each.heard)[each.kept] == list(each.labelled)
        before = each.labelled.start - each.heard.start
        after = each.heard.stop - each.labelled.stop
        assert before == min(config.overlap_frames, each.labelled.start) or len(cut) == 1
        assert after == min(config.overlap_frames, num_frames - each.labelled.stop) or len(cut) == 1


def test_windows_are_of_like_length() -> None:
    """101 frames in windows that label 50 at most are 33, 34 and 34, not 50, 50 and 1."""
    cut = windows(101, WindowsConfig(70, 10))
    assert [len(each.labelled) for each in cut] == [33, 34, 34]
    assert windows(70, WindowsConfig(70, 10))[0].kept == slice(0, 70)


def posteriors_in_windows(
    model: LstmModel, frames: torch.Tensor, config: WindowsConfig
) -> np.ndarray:
    parts = [
        model.utterance_logits([frames[each.heard.start : each.heard.stop]])[0][each.kept]
        for each in windows(len(frames), config)
    ]
    return torch.cat(parts).softmax(dim=1).numpy()


def test_the_overlap_bounds_what_a_cut_changes() -> None:
    """A bidirectional model's posteriors: 0.07 apart without overlap, 0.0002 with 30 frames."""
    torch.manual_seed(0)
    config = LstmConfig(2, 24, bidirectional=True, look_ahead=0, dropout=0.0)
    model = LstmModel(config, 20).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)  # an untrained model hardly remembers
    frames = torch.randn(600, 192, generator=torch.Generator().manual_seed(1))
    whole = model.utterance_logits([frames])[0].softmax(dim=1).numpy()
    none, some, enough = (
        np.abs(posteriors_in_windows(model, frames, WindowsConfig(100, overlap)) - whole).max()
        for overlap in (0, 10, 30)
    )
    assert none > 0.05
    assert none > some > 0.01
    assert enough < 0.0005


def test_an_overlap_leaves_something_to_label() -> None:
    """Twice the overlap must be less than the window."""
    with pytest.raises(ValueError, match=r"overlap_frames = 50: need less than half of .* = 100"):
        WindowsConfig(100, 50)
