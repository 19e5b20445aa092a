"""A deep neural network of sigmoids or rectified linear units over a window of frames (004 5)."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from pipeline.filterbank import NUM_INPUTS
from training.settings.models import FeedForwardConfig


class FeedForward(nn.Module):
    """FeedForward maps (batch, frames, 192) to logits, or an utterance's pieces.

    Logits t come from the window that ends at frame t, and speak of frame t - `look_ahead`. Before
    an utterance, and before a chunk of training, the window has zeros, which are the mean.
    """

    def __init__(self, config: FeedForwardConfig, num_senones: int) -> None:
        super().__init__()
        self.num_before = config.left_frames + config.look_ahead
        width = (self.num_before + 1) * NUM_INPUTS
        layers = list[nn.Module]()
        for number in range(config.num_layers):
            layer = nn.Linear(width if number == 0 else config.num_units, config.num_units)
            _initialize(layer, config, is_first=number == 0)
            layers += [layer, nn.Sigmoid() if config.unit == "sigmoid" else nn.ReLU()]
        self.layers = nn.Sequential(*layers)
        self.output = nn.Linear(config.num_units, num_senones)

    def forward(
        self, frames: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch frames senones"]:
        """Return the logits of whole utterances, or of chunks of training as if they were whole."""
        del lengths  # padding comes after the frames, which no window looks beyond
        return self._logits(functional.pad(frames, (0, 0, self.num_before, 0)))

    def advance(
        self, frames: Float[Tensor, "frames dim"], state: object, is_last: bool
    ) -> tuple[Float[Tensor, "outputs senones"], Float[Tensor, "before dim"]]:
        """Return the logits of the next frames, and the frames that the next windows begin with."""
        del is_last
        before = (
            state if isinstance(state, Tensor) else frames.new_zeros(self.num_before, NUM_INPUTS)
        )
        known = torch.cat([before, frames])
        after = known[len(frames) :]
        if len(frames) == 0:
            return frames.new_empty(0, self.output.out_features), after
        return self._logits(known[None])[0], after

    def _logits(
        self, known: Float[Tensor, "batch known dim"]
    ) -> Float[Tensor, "batch frames senones"]:
        windows = known.unfold(1, self.num_before + 1, 1)
        logits: Tensor = self.output(self.layers(windows.flatten(2)))
        return logits


def _initialize(layer: nn.Linear, config: FeedForwardConfig, *, is_first: bool) -> None:
    """Draw weights by which gradients keep their size through all layers.

    Paper 004 begins with a pretraining that it does not describe. A sigmoid's slope is at most 1/4,
    so its weights are four times as large (Glorot and Bengio 2010), and its mean of 1/2 is
    subtracted from the next layer's inputs.
    """
    nn.init.zeros_(layer.bias)
    if config.unit == "relu":
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        return
    nn.init.xavier_uniform_(layer.weight, gain=1.0 if is_first else 4.0)
    if not is_first:
        with torch.no_grad():
            layer.bias.copy_(-0.5 * layer.weight.sum(dim=1))
