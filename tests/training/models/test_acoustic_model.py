"""The acoustic model: delay, padding, frozen normalization."""

import numpy as np
import pytest
import torch

from pipeline.filterbank import NUM_BINS, NUM_INPUTS
from pipeline.normalization import Moments
from training.models.lstm import LstmModel
from training.models.store import TrainedModel, decode_model, encode_model
from training.settings.models import LstmConfig

STUDENT = LstmConfig(2, 8, bidirectional=False, look_ahead=3, dropout=0.0)
TEACHER = LstmConfig(2, 8, bidirectional=True, look_ahead=0, dropout=0.0)


@pytest.mark.parametrize("config", [STUDENT, TEACHER])
def test_batching_utterances_does_not_change_their_logits(config: LstmConfig) -> None:
    """Padding reaches no utterance, backwards in time neither."""
    torch.manual_seed(0)
    model = LstmModel(config, 5).eval()
    utterances = [torch.randn(length, NUM_INPUTS) for length in (4, 9, 1)]
    together = model.utterance_logits(utterances)
    for utterance, logits in zip(utterances, together, strict=True):
        assert logits.shape == (len(utterance), 5)
        torch.testing.assert_close(model.utterance_logits([utterance])[0], logits)


def test_the_student_looks_exactly_three_frames_ahead() -> None:
    """Logits of frame t change with frame t + 3 and not with frame t + 4 (003 II-B)."""
    torch.manual_seed(0)
    model = LstmModel(STUDENT, 5).eval()
    frames = torch.randn(20, NUM_INPUTS)
    logits = model.utterance_logits([frames])[0]
    for ahead, changes in ((3, True), (4, False)):
        changed = frames.clone()
        changed[10 + ahead] += 1
        differs = not torch.equal(model.utterance_logits([changed])[0][10], logits[10])
        assert differs == changes


def test_normalization_is_part_of_the_model() -> None:
    """Frames in any units give the logits of their normalized selves; the store keeps that."""
    torch.manual_seed(0)
    frames = np.random.default_rng(0).normal(5, 3, size=(50, NUM_BINS))
    model = LstmModel(STUDENT, 5).eval()
    normalized = torch.from_numpy((frames - frames.mean(0)) / frames.std(0)).float()
    expected = model.utterance_logits([normalized[:48].reshape(16, NUM_INPUTS)])[0]
    model.freeze_normalization(Moments.of(frames))
    stored = decode_model(encode_model(TrainedModel(model, torch.zeros(5))), STUDENT).model
    raw = torch.from_numpy(frames).float()[:48].reshape(16, NUM_INPUTS)
    torch.testing.assert_close(stored.utterance_logits([raw])[0], expected, rtol=1e-4, atol=1e-4)


def test_the_papers_models_have_the_papers_sizes() -> None:
    """24 M parameters at 3,183 senones; both ways 67.5 M, where the paper counts 78 M (V-A)."""

    def millions(bidirectional: bool) -> float:
        look_ahead = 0 if bidirectional else 3
        model = LstmModel(LstmConfig(5, 768, bidirectional, look_ahead, 0.0), 3183)
        return sum(parameter.numel() for parameter in model.parameters()) / 1e6

    assert 23.5 < millions(False) < 25.5
    assert 66 < millions(True) < 69
