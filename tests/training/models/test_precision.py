"""In bfloat16 a model computes as one of bfloat16 weights would, and keeps float32 ones."""

import copy

import pytest
import torch
from torch import Tensor, nn

from training.models.acoustic_model import AcousticModel
from training.models.lstm import LstmConfig, LstmModel
from training.models.precision import lstm_in_bfloat16, set_float32_products


def acoustic_model(bidirectional: bool = False) -> AcousticModel:
    torch.manual_seed(0)
    look_ahead = 0 if bidirectional else 2
    return LstmModel(LstmConfig(2, 16, bidirectional, look_ahead, 0.0), 9)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("lengths", [None, torch.tensor([6, 4, 1])])
def test_computes_as_a_model_of_bfloat16_weights(
    bidirectional: bool, lengths: Tensor | None
) -> None:
    """Bitwise: logits of float32 type, and gradients at the float32 weights."""
    model = acoustic_model(bidirectional)
    half = copy.deepcopy(model).bfloat16()
    features = torch.randn(3, 6, 192)
    logits = model(features, lengths, "bfloat16")
    expected = half(features.bfloat16(), lengths)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, expected.float())
    logits.square().sum().backward()
    expected.float().square().sum().backward()
    for mine, other in zip(model.parameters(), half.parameters(), strict=True):
        assert other.grad is not None
        assert mine.grad is not None
        assert mine.grad.dtype == mine.dtype == torch.float32
        assert torch.equal(mine.grad, other.grad.float())


def test_weights_in_one_piece_are_rounded_to_one() -> None:
    """In the places that cuDNN's layout gave them, gaps included, for each minibatch again."""
    lstm = nn.LSTM(6, 5, 2)
    weights = list(lstm.parameters())
    piece = torch.randn(sum(each.numel() for each in weights) + 7 * len(weights))
    place = 3
    for weight in weights:
        weight.data = piece[place : place + weight.numel()].view(weight.shape)
        place += weight.numel() + 7
    for _ in range(2):
        rounded = lstm_in_bfloat16(lstm)._flat_weights
        assert len({each.untyped_storage().data_ptr() for each in rounded}) == 1
        for weight, each in zip(weights, rounded, strict=True):
            assert torch.equal(each, weight.bfloat16())
            assert each.storage_offset() == weight.storage_offset()
        with torch.no_grad():
            piece.mul_(2)
    assert dict(lstm.named_parameters()).keys() == dict(nn.LSTM(6, 5, 2).named_parameters()).keys()


@pytest.mark.parametrize(
    ("precision", "expected"), [("float32", "ieee"), ("tf32", "tf32"), ("bfloat16", "ieee")]
)
def test_tf32_is_used_where_it_is_asked_for(precision: str, expected: str) -> None:
    """For matrices, LSTMs and convolutions alike; torch itself uses it for the last two."""
    set_float32_products(precision)
    cudnn = torch.backends.cudnn
    products = torch.backends.cuda.matmul, cudnn.rnn, cudnn.conv
    assert {each.fp32_precision for each in products} == {expected}
