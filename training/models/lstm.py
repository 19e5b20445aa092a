"""LSTM student and bidirectional LSTM teacher (paper 003 II-B, V-A)."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from pipeline.splicing import NUM_INPUTS
from training.configuration.models import LstmConfig
from training.models.acoustic_model import AcousticModel
from training.models.padded_lstm import padded_lstm
from training.models.precision import linear_in_bfloat16, lstm_in_bfloat16, summed_in_float32


class LstmModel(AcousticModel):
    """LstmModel: layers of LSTMs, and an output layer."""

    def __init__(self, config: LstmConfig, num_senones: int) -> None:
        super().__init__(config, num_senones)
        self.lstm = nn.LSTM(
            NUM_INPUTS,
            config.num_units,
            config.num_layers,
            batch_first=True,
            bidirectional=config.bidirectional,
            dropout=config.dropout if config.num_layers > 1 else 0.0,
        )
        # 003 V-A counts 78 M parameters for its teacher; five such layers have 67.5 M.
        num_outputs = config.num_units * (2 if config.bidirectional else 1)
        self.output = nn.Linear(num_outputs, num_senones)

    def normalized_logits(
        self, normalized: Float[Tensor, "batch frames 192"], lengths: Int64[Tensor, " batch"] | None
    ) -> Float[Tensor, "batch frames senones"]:
        """Return logits, `look_ahead` frames late."""
        logits: Tensor = self.output(padded_lstm(self.lstm, normalized, lengths))
        return logits

    def bfloat16_logits(
        self, normalized: Float[Tensor, "batch frames 192"], lengths: Int64[Tensor, " batch"] | None
    ) -> Float[Tensor, "batch frames senones"]:
        """Compute by rounded weights, an LSTM's in one piece; in inference, sums are float32."""
        hidden = padded_lstm(lstm_in_bfloat16(self.lstm), normalized, lengths)
        if torch.is_inference_mode_enabled():
            return summed_in_float32(self.output, hidden)
        return linear_in_bfloat16(self.output, hidden)

    @property
    def carries_state(self) -> bool:
        """Return whether no layer runs backwards in time."""
        return not self.lstm.bidirectional

    def advance(
        self, normalized: Float[Tensor, "frames 192"], state: object, is_last: bool
    ) -> tuple[Float[Tensor, "outputs senones"], object]:
        """Compute the next frames from the last state; no output waits for more."""
        del is_last
        if self.lstm.bidirectional:
            raise ValueError("a bidirectional LSTM has no pieces: give it whole utterances")
        if len(normalized) == 0:
            return normalized.new_empty(0, self.num_senones), state
        hidden, after = self.lstm(normalized, state)
        return self.output(hidden), after
