"""In bfloat16 a model computes as one of bfloat16 weights would, and keeps float32 ones."""

import copy

import pytest
import torch
from torch import Tensor, nn

from pipeline.filterbank import NUM_INPUTS
from training.models.acoustic_model import AcousticModel
from training.models.lstm import LstmModel
from training.models.precision import fastest_precision, lstm_in_bfloat16, set_float32_products
from training.settings.models import LstmConfig


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
    features = torch.randn(3, 6, NUM_INPUTS)
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


@pytest.mark.parametrize("bidirectional", [False, True])
def test_inference_keeps_the_bits_of_the_last_sums(bidirectional: bool) -> None:
    """Logits are the rounded hidden values by rounded weights, within float32's own rounding."""
    model = acoustic_model(bidirectional)
    utterances = [torch.randn(length, NUM_INPUTS) for length in (9, 4)]
    hidden: list[Tensor] = []
    model.output.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    half = copy.deepcopy(model).bfloat16()
    half.utterance_logits([each.bfloat16() for each in utterances])
    double = copy.deepcopy(half.output).double()
    double.bias.data.copy_(model.output.bias)
    found = model.utterance_logits(utterances, "bfloat16")
    delay = model.config.delay
    for number, logits in enumerate(found):
        row = hidden[0][number, delay : delay + len(logits)]
        torch.testing.assert_close(logits.double(), double(row.double()), rtol=1e-6, atol=1e-6)
        exact = model.utterance_logits(utterances)[number]
        torch.testing.assert_close(logits, exact, rtol=0.05, atol=0.02)


def test_a_cpu_labels_in_float32() -> None:
    """Nothing there computes bfloat16 faster."""
    assert fastest_precision(torch.device("cpu")) == "float32"
