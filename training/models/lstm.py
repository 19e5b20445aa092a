"""The LSTM student and the bidirectional LSTM teacher (paper 003 II-B, V-A).

Utterances of a minibatch are padded; no padding reaches a frame in either direction.
"""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from pipeline.filterbank import NUM_BINS, NUM_INPUTS, STACK
from training.models.acoustic_model import AcousticModel
from training.models.precision import lstm_in_bfloat16, rounded_linear, summed_in_float32
from training.settings.models import (
    FIRST_BINS,
    FIRST_STRIDE,
    NUM_SECOND_PLACES,
    SECOND_PLACES,
    LstmConfig,
    ProjectedBlstmConfig,
)


def padded_lstm(
    lstm: nn.LSTM, inputs: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
) -> Float[Tensor, "batch frames outputs"]:
    """Return what `lstm`, which is `batch_first`, makes of each sequence up to its length.

    `lengths` are on the host and at least 1. Outputs beyond them mean nothing. The host waits for
    no device.
    """
    # Only backwards in time could padding reach a frame.
    if not lstm.bidirectional or bool((lengths == inputs.shape[1]).all()):
        hidden: Tensor = lstm(inputs)[0]
        return hidden
    return (packed_lstm if inputs.is_cuda else reversing_lstm)(lstm, inputs, lengths)


def packed_lstm(
    lstm: nn.LSTM, inputs: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
) -> Float[Tensor, "batch frames outputs"]:
    """Pack the sequences, which cuDNN reads both ways in one call."""
    # Left to sort by itself, packing copies the order to a GPU in a way that waits for it.
    order = lengths.argsort(descending=True, stable=True)
    chosen, places = (
        each.to(inputs.device, non_blocking=True) for each in (order, order.argsort())
    )
    packed = pack_padded_sequence(inputs.index_select(0, chosen), lengths[order], batch_first=True)
    hidden, _ = pad_packed_sequence(lstm(packed)[0], batch_first=True, total_length=inputs.shape[1])
    return hidden.index_select(0, places)


def reversing_lstm(
    lstm: nn.LSTM, inputs: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
) -> Float[Tensor, "batch frames outputs"]:
    """Run the backward LSTMs forward, over sequences that are reversed within their lengths."""
    # oneDNN takes no packed sequences, and without it a step takes half as long again.
    hidden = inputs.transpose(0, 1).contiguous()
    rows = reversed_rows(lengths, inputs.shape[1]).to(inputs.device)
    for layer in range(lstm.num_layers):
        # Each direction of a layer sees both directions of the layer before.
        ahead = _one_direction(lstm, f"l{layer}", hidden)
        back = _one_direction(lstm, f"l{layer}_reverse", _in_order(hidden, rows))
        hidden = torch.cat([ahead, _in_order(back, rows)], dim=-1)
        if layer < lstm.num_layers - 1:
            hidden = functional.dropout(hidden, lstm.dropout, lstm.training)
    return hidden.transpose(0, 1)


def reversed_rows(lengths: Int64[Tensor, " batch"], num_frames: int) -> Int64[Tensor, " rows"]:
    """Return the rows, frame * batch + sequence, in an order that reverses each sequence.

    Padding remains in its place, so the order is its own inverse.
    """
    steps = torch.arange(num_frames).view(-1, 1)
    frames = torch.where(steps < lengths, lengths - 1 - steps, steps)
    return (frames * len(lengths) + torch.arange(len(lengths))).view(-1)


def _one_direction(
    lstm: nn.LSTM, suffix: str, inputs: Float[Tensor, "frames batch dim"]
) -> Float[Tensor, "frames batch units"]:
    """Run one layer's LSTM of one direction forward in time, from a state of zeros."""
    names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    weights = [getattr(lstm, f"{name}_{suffix}") for name in names]
    zeros = inputs.new_zeros(1, inputs.shape[1], lstm.hidden_size)
    # has_biases, num_layers, dropout, train, bidirectional, batch_first
    settings = (True, 1, 0.0, lstm.training, False, False)
    return torch.lstm(inputs, (zeros, zeros), weights, *settings)[0]


def _in_order(
    sequences: Float[Tensor, "frames batch units"], rows: Int64[Tensor, " rows"]
) -> Float[Tensor, "frames batch units"]:
    reordered: Tensor = _Permutation.apply(sequences, rows)  # type: ignore[no-untyped-call]
    return reordered


class _Permutation(torch.autograd.Function):
    """_Permutation takes rows in an order that is its own inverse, and so is its gradient's."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        sequences: Float[Tensor, "frames batch units"],
        rows: Int64[Tensor, " rows"],
    ) -> Float[Tensor, "frames batch units"]:
        ctx.save_for_backward(rows)
        return sequences.flatten(0, 1).index_select(0, rows).view(sequences.shape)

    @staticmethod
    def backward(
        ctx: BackwardCFunction, gradient: Float[Tensor, "frames batch units"]
    ) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        # index_select's own gradient adds row by row, as an order with repeated rows would need.
        return _in_order(gradient, rows), None


class FrequencyFilters(nn.Module):
    """FrequencyFilters see neighbouring bins of a row, before an LSTM (Sainath et al. 2015, CLDNN).

    A shorter vocal tract has its formants higher. These are the same filters at all places, so that
    a model of few speakers knows their formants in others' voices too. They see no other row, and
    so pieces of an utterance need no state of them. A linear layer makes them few again.
    """

    def __init__(self, num_filters: int, num_outputs: int) -> None:
        super().__init__()
        self.first = nn.Linear(STACK * FIRST_BINS, num_filters)
        self.second = nn.Linear(num_filters * SECOND_PLACES, num_filters)
        self.projection = nn.Linear(num_filters * NUM_SECOND_PLACES, num_outputs)

    def forward(self, rows: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch outputs"]:
        """Return the projected outputs of all places, in the numbers of the rows."""
        # Products of unfolded rows: on a GPU, gradients of convolutions add in any order.
        bins = rows.reshape(-1, STACK, NUM_BINS).unfold(2, FIRST_BINS, FIRST_STRIDE)
        heard = rounded_linear(self.first, bins.transpose(1, 2).flatten(2)).relu()
        outputs = rounded_linear(self.second, heard.unfold(1, SECOND_PLACES, 1).flatten(2)).relu()
        places = outputs.view(*rows.shape[:-1], self.projection.in_features)
        return rounded_linear(self.projection, places)


def _lstm(config: LstmConfig | ProjectedBlstmConfig, num_inputs: int) -> nn.LSTM:
    return nn.LSTM(
        num_inputs,
        config.num_units,
        config.num_layers,
        batch_first=True,
        bidirectional=config.bidirectional,
        # Dropout is between layers, and torch warns of any beside a single one.
        dropout=config.dropout if config.num_layers > 1 else 0.0,
    )


class LstmModel(AcousticModel):
    """LstmModel: filters over frequency if it has some, layers of LSTMs, and an output layer."""

    def __init__(self, config: LstmConfig, num_senones: int) -> None:
        super().__init__(config, num_senones)
        filters, units = config.num_filters, config.num_units
        self.filters = FrequencyFilters(filters, units) if filters else nn.Identity()
        self.lstm = _lstm(config, units if filters else NUM_INPUTS)
        # 003 V-A counts 78 M parameters for its teacher; five such layers have 67.5 M.
        num_outputs = units * (2 if config.bidirectional else 1)
        self.output = nn.Linear(num_outputs, num_senones)

    def normalized_logits(
        self, normalized: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch frames senones"]:
        """Return logits, `look_ahead` frames late."""
        logits: Tensor = self.output(padded_lstm(self.lstm, self.filters(normalized), lengths))
        return logits

    def bfloat16_logits(
        self, normalized: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch frames senones"]:
        """Compute by rounded weights, an LSTM's in one piece; in inference, sums are float32."""
        hidden = padded_lstm(lstm_in_bfloat16(self.lstm), self.filters(normalized), lengths)
        if torch.is_inference_mode_enabled():
            return summed_in_float32(self.output, hidden)
        return rounded_linear(self.output, hidden)

    @property
    def carries_state(self) -> bool:
        """Return whether no layer runs backwards in time."""
        return not self.lstm.bidirectional

    def advance(
        self, normalized: Float[Tensor, "frames dim"], state: object, is_last: bool
    ) -> tuple[Float[Tensor, "outputs senones"], object]:
        """Compute the next frames from the last state; no output waits for more."""
        del is_last
        if len(normalized) == 0:
            return normalized.new_empty(0, self.num_senones), state
        hidden, after = self.lstm(self.filters(normalized), state)
        return self.output(hidden), after


class ProjectedBlstm(nn.Module):
    """ProjectedBlstm maps (batch, frames, 192) and lengths to logits by way of a few units (001).

    Of 32,000 senones the output layer would else have three quarters of all parameters.
    """

    def __init__(self, config: ProjectedBlstmConfig, num_senones: int) -> None:
        super().__init__()
        self.lstm = _lstm(config, NUM_INPUTS)
        self.projection = nn.Linear(2 * config.num_units, config.num_projected_units)
        self.output = nn.Linear(config.num_projected_units, num_senones)

    def forward(
        self, frames: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch frames senones"]:
        """Return the logits of whole utterances, or of chunks of training as if they were whole."""
        logits: Tensor = self.output(self.projection(padded_lstm(self.lstm, frames, lengths)))
        return logits
