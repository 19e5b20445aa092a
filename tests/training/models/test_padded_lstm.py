"""A bidirectional LSTM over padded sequences: packed, reversed within lengths, or as it is."""

import copy
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from training.models import lstm as module
from training.models.lstm import packed_lstm, padded_lstm, reversing_lstm

NUM_INPUTS = 6
Run = Callable[[nn.LSTM, Tensor, Tensor], Tensor]


def make_lstm(num_layers: int = 2, dropout: float = 0.0, bidirectional: bool = True) -> nn.LSTM:
    torch.manual_seed(num_layers)
    return nn.LSTM(
        NUM_INPUTS, 5, num_layers, batch_first=True, dropout=dropout, bidirectional=bidirectional
    )


def one_by_one(lstm: nn.LSTM, inputs: Tensor, lengths: Tensor) -> Tensor:
    """Each sequence alone, without padding; zeros behind it."""
    pairs = zip(inputs, lengths, strict=True)
    rows = [lstm(row[:length].unsqueeze(0))[0][0] for row, length in pairs]
    filled = [torch.cat([row, row.new_zeros(inputs.shape[1] - len(row), 10)]) for row in rows]
    return torch.stack(filled)


def outputs_and_gradients(
    run: Run, lstm: nn.LSTM, inputs: Tensor, lengths: Tensor, weights: Tensor
) -> list[Tensor]:
    """The outputs within lengths, and the gradients of a weighted sum of their squares."""
    inputs = inputs.clone().requires_grad_()
    lstm.zero_grad()
    present = torch.arange(inputs.shape[1]) < lengths.unsqueeze(1)
    outputs = run(lstm, inputs, lengths)[present]
    (outputs.square() * weights[present]).sum().backward()
    return [outputs.detach(), inputs.grad, *(each.grad.clone() for each in lstm.parameters())]


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(1, 12), min_size=1, max_size=6),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_padding_reaches_no_frame(
    lengths: list[int], num_layers: int, num_more: int, dtype: torch.dtype
) -> None:
    """Outputs, and gradients of inputs and weights, are float64's of the sequences one by one."""
    lstm = make_lstm(num_layers).to(dtype)
    shape = (len(lengths), max(lengths) + num_more)
    inputs, weights = (torch.randn(*shape, size, dtype=dtype) for size in (NUM_INPUTS, 10))
    given = (lstm, inputs, torch.tensor(lengths), weights)
    # Two float32 runs may differ by 1.3e-6; from float64's values each is at most 0.8e-6 away.
    exact = copy.deepcopy(lstm).double(), inputs.double(), given[2], weights.double()
    expected = outputs_and_gradients(one_by_one, *exact)
    relative = 1e-6 if dtype == torch.float32 else 1e-12
    for run in (padded_lstm, reversing_lstm, packed_lstm):
        for found, right in zip(outputs_and_gradients(run, *given), expected, strict=True):
            assert (found - right).abs().max() <= relative * max(1, right.abs().max())


@pytest.mark.parametrize("training", [True, False])
def test_equal_lengths_are_the_plain_lstm(training: bool) -> None:
    """To the bit, with dropout too, which reversing draws as `nn.LSTM` does."""
    lstm = make_lstm(3, dropout=0.5).train(training)
    inputs, lengths = torch.randn(4, 9, NUM_INPUTS), torch.full((4,), 9)

    def seeded(run: Run) -> Tensor:
        torch.manual_seed(1)
        return run(lstm, inputs, lengths)

    plain = seeded(lambda lstm, inputs, _: lstm(inputs)[0])
    assert torch.equal(seeded(padded_lstm), plain)
    torch.testing.assert_close(seeded(reversing_lstm), plain, rtol=1e-6, atol=1e-6)


def test_a_cpu_packs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed sequences do not reach oneDNN, and a step on them takes 1.4 times as long."""
    monkeypatch.delattr(module, "packed_lstm")
    lstm, inputs, lengths = make_lstm(), torch.randn(2, 5, NUM_INPUTS), torch.tensor([5, 2])
    assert torch.equal(padded_lstm(lstm, inputs, lengths), reversing_lstm(lstm, inputs, lengths))


def test_one_way_lstms_read_padding_as_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the frames, so that one call of `nn.LSTM` is right, whatever the lengths."""
    for name in ("packed_lstm", "reversing_lstm"):
        monkeypatch.delattr(module, name)
    lstm = make_lstm(bidirectional=False)
    inputs = torch.randn(3, 7, NUM_INPUTS)
    assert torch.equal(padded_lstm(lstm, inputs, torch.tensor([7, 2, 1])), lstm(inputs)[0])
