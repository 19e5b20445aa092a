"""The Conformer: masks against plain attention, pieces, padding, look-ahead, gradients."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from pipeline.filterbank import NUM_INPUTS
from training.models.acoustic_model import AcousticModel
from training.models.conformer import ChunkedAttention
from training.models.store import make_model
from training.settings.models import ConformerConfig, LstmConfig

SMALL = {"num_layers": 2, "num_units": 12, "num_heads": 3, "dropout": 0.0}
SHAPES = [(4, 24, 15), (1, 0, 1), (3, 7, 2), (5, 4, 4)]
"""Frames of a chunk, of its past, of the convolution."""


def conformer(shape: tuple[int, int, int], **others) -> AcousticModel:
    """A model with weights large enough that each path matters."""
    chunk, left, kernel = shape
    config = ConformerConfig(
        **{**SMALL, **others}, chunk_frames=chunk, left_frames=left, kernel_frames=kernel
    )
    torch.manual_seed(0)
    model = make_model(config, 7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.normal_(0, 1.5 if "bias" in name else 0.3)
    return model.eval()


@pytest.mark.parametrize("shape", SHAPES)
def test_windows_are_plain_attention_with_a_mask(shape: tuple[int, int, int]) -> None:
    """Against all pairs of frames, masked: from `left` before the chunk to the chunk's end."""
    chunk, left, _ = shape
    num_frames, lengths = 3 * chunk, torch.tensor([3 * chunk, chunk + 1])
    torch.manual_seed(0)
    attention = ChunkedAttention(12, 3, chunk, left).double()
    torch.nn.init.normal_(attention.distance_bias)
    frames = torch.randn(2, num_frames, 12, dtype=torch.float64)
    is_frame = torch.arange(num_frames) < lengths.view(-1, 1)
    found, _ = attention(frames, frames.new_zeros(2, left, 24), functional.pad(is_frame, (left, 0)))
    queries, keys, values = (
        each.unflatten(-1, (3, 4)).transpose(1, 2)
        for each in attention.inputs(frames).split(12, dim=-1)
    )
    steps = torch.arange(num_frames)
    first = steps // chunk * chunk
    sees = (steps >= first[:, None] - left) & (steps < first[:, None] + chunk)
    distances = (steps - steps[:, None]).clamp(-left - chunk + 1, chunk - 1) + left + chunk - 1
    mask = (
        attention.distance_bias[:, distances].masked_fill(~sees, -torch.inf).expand(2, -1, -1, -1)
    )
    mask = mask.masked_fill(~is_frame[:, None, None], -torch.inf)
    attended = functional.scaled_dot_product_attention(queries, keys, values, mask)
    expected = attention.outputs(attended.transpose(1, 2).flatten(2))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(found[row, :length], expected[row, :length])


def in_pieces(model: AcousticModel, frames: Tensor, sizes: list[int]) -> Tensor:
    return torch.cat(list(model.piece_logits(torch.split(frames, sizes))))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=12), st.sampled_from(range(5)))
def test_pieces_give_what_the_whole_gives(sizes: list[int], number: int) -> None:
    """At any boundaries, to 1e-5, of Conformers and of the LSTM, which is late."""
    makers = [partial(conformer, shape) for shape in SHAPES]
    makers.append(lambda: make_model(LstmConfig(2, 8, False, 3, 0.0), 7).eval())
    model = makers[number]()
    frames = torch.randn(sum(sizes) + 1, NUM_INPUTS)
    (whole,) = model.utterance_logits([frames])
    found = in_pieces(model, frames, [*sizes, 1])
    assert found.shape == whole.shape
    torch.testing.assert_close(found, whole, rtol=0, atol=1e-5)


def test_logits_come_as_soon_as_a_chunk_is_there() -> None:
    """A frame waits for its chunk's end alone; the rest comes with the utterance's end."""
    model = conformer((4, 8, 3))
    counts = [
        len(each) for each in model.piece_logits(torch.randn(11, NUM_INPUTS).split([3, 1, 0, 5, 2]))
    ]
    assert counts == [0, 4, 0, 4, 0, 3]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_frame_sees_to_the_end_of_its_chunk(shape: tuple[int, int, int]) -> None:
    """And no further: the first of a chunk look_ahead frames, the last none."""
    chunk = shape[0]
    model = conformer(shape)
    frames = torch.randn(4 * chunk, NUM_INPUTS)
    (logits,) = model.utterance_logits([frames])
    for cut in range(1, len(frames)):
        changed = frames.clone()
        changed[cut:] += 1
        differs = (model.utterance_logits([changed])[0] != logits).any(-1)
        assert int(differs.int().argmax()) == cut // chunk * chunk
    assert model.config.look_ahead == chunk - 1


@pytest.mark.parametrize("shape", SHAPES)
def test_padding_reaches_no_frame(shape: tuple[int, int, int]) -> None:
    """Together as alone, whatever padding holds; nor do its gradients, which are finite."""
    model = conformer(shape)
    utterances = [torch.randn(length, NUM_INPUTS) for length in (17, 40, 1)]
    together = model.utterance_logits(utterances)
    for utterance, logits in zip(utterances, together, strict=True):
        torch.testing.assert_close(
            logits, model.utterance_logits([utterance])[0], rtol=1e-4, atol=1e-5
        )
    features = torch.randn(2, 30, NUM_INPUTS, requires_grad=True)
    logits = model(features, torch.tensor([30, 6]))
    (logits[0].square().sum() + logits[1, :6].square().sum()).backward()
    assert features.grad is not None
    assert bool(features.grad.isfinite().all())
    assert bool((features.grad[1, 6:] == 0).all())
    assert bool((features.grad[0] != 0).any(-1).all())


def test_heads_must_share_the_units() -> None:
    """The message names both."""
    with pytest.raises(ValueError, match="num_units = 10: need a multiple of num_heads = 4"):
        ConformerConfig(num_units=10)
