"""LSTM student and bidirectional LSTM teacher over spliced log-mel frames (paper 003 II-B, V-A)."""

from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from infra.ranges import Range, check_ranges
from pipeline.normalization import Moments
from pipeline.splicing import NUM_INPUTS, STACK
from training.models.padded_lstm import padded_lstm
from training.models.precision import Precision, linear_in_bfloat16, lstm_in_bfloat16


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """ModelConfig: the paper has 5 layers of 768 units, for its teacher the same both ways."""

    num_layers: Annotated[int, Range(1, 100)]
    num_units: Annotated[int, Range(1, 16_384)]
    bidirectional: bool
    # 000 3.2 found three low-rate frames to give the best WERR.
    look_ahead: Annotated[int, Range(0, 1000)]
    dropout: Annotated[float, Range(0, 1, below=True)]

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.bidirectional and self.look_ahead:
            raise ValueError(
                f"look_ahead = {self.look_ahead}: need 0 for a bidirectional model, which sees "
                "all frames"
            )


class AcousticModel(nn.Module):
    """AcousticModel maps spliced frames to senone logits, with global mean and variance frozen in.

    Outputs are `look_ahead` low-rate frames late: logits[t] speak of frame t - look_ahead.
    """

    mean: Tensor
    inverse_deviation: Tensor

    def __init__(self, config: ModelConfig, num_senones: int) -> None:
        super().__init__()
        self.config = config
        self.num_senones = num_senones
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
        self.register_buffer("mean", torch.zeros(NUM_INPUTS))
        self.register_buffer("inverse_deviation", torch.ones(NUM_INPUTS))

    @property
    def device(self) -> torch.device:
        """Return where the model lies, and its inputs must."""
        return self.mean.device

    def freeze_normalization(self, moments: Moments) -> None:
        """Set the global mean and variance (003 IV-B2), the same for each of the spliced frames."""
        mean = torch.from_numpy(moments.mean).float()
        deviation = torch.from_numpy(moments.standard_deviation).float()
        self.mean.copy_(mean.repeat(STACK))
        self.inverse_deviation.copy_(deviation.clamp(min=1e-5).reciprocal().repeat(STACK))

    def forward(
        self,
        features: Float[Tensor, "batch frames 192"],
        lengths: Int64[Tensor, " batch"] | None = None,
        precision: Precision = "float32",
    ) -> Float[Tensor, "batch frames senones"]:
        """Return logits, `look_ahead` frames late; padding starts at `lengths`, if given."""
        # Normalizing here spares a second pass over the features, 46 TB at a million hours.
        normalized = (features - self.mean).mul_(self.inverse_deviation)
        if precision == "bfloat16":
            rounded = lstm_in_bfloat16(self.lstm)
            hidden = padded_lstm(rounded, normalized.bfloat16(), lengths)
            # Logits of 8 bits: a CPU has no product of bfloat16 that gives float32. The softmax
            # over thousands of senones sums them in float32.
            return linear_in_bfloat16(self.output, hidden).float()
        logits: Tensor = self.output(padded_lstm(self.lstm, normalized, lengths))
        return logits

    @torch.inference_mode()
    def utterance_logits(
        self, utterances: list[Float[Tensor, "_frames 192"]]
    ) -> list[Float[Tensor, "_frames senones"]]:
        """Return logits of whole utterances, aligned with their frames, the delay undone."""
        delay = self.config.look_ahead
        extended = [delay_input(utterance, delay) for utterance in utterances]
        lengths = torch.tensor([len(frames) for frames in extended])
        logits = self(pad_sequence(extended, batch_first=True), lengths)
        return [
            row[delay : delay + len(frames)] for row, frames in zip(logits, utterances, strict=True)
        ]


def delay_input(
    features: Float[Tensor, "frames 192"], look_ahead: int
) -> Float[Tensor, "extended 192"]:
    """Append the last frame `look_ahead` times, so that the delayed outputs cover all frames."""
    return torch.cat([features, features[-1:].expand(look_ahead, -1)]) if look_ahead else features
