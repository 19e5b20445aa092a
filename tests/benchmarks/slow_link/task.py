"""Define the task: a multilayer perceptron classifies frames of a Gaussian mixture."""

from collections.abc import Mapping
from itertools import pairwise

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.func import functional_call

NUM_INPUTS = 64
NUM_CLASSES = 128
COMPONENTS_PER_CLASS = 4
HIDDEN = 512
SPREAD = 0.8  # of the components' means; the noise around them has 1
VALIDATION_FRAMES = 4096


def new_model(seed: int) -> nn.Module:
    """Make a model of 0.62 M parameters, 2.5 MB."""
    torch.manual_seed(seed)
    sizes = [NUM_INPUTS, HIDDEN, HIDDEN, HIDDEN]
    layers = [
        layer
        for inputs, outputs in pairwise(sizes)
        for layer in (nn.Linear(inputs, outputs), nn.ReLU())
    ]
    return nn.Sequential(*layers, nn.Linear(HIDDEN, NUM_CLASSES))


class Frames:
    """Frames samples a Gaussian mixture with several components a class; `seed` chooses it."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_components = NUM_CLASSES * COMPONENTS_PER_CLASS
        self.seed = seed
        self.means = SPREAD * torch.randn(num_components, NUM_INPUTS, generator=generator)

    def minibatch(
        self, step: int, rank: int, num_frames: int
    ) -> tuple[Float[Tensor, "frames inputs"], Int64[Tensor, " frames"]]:
        """Return frames and classes that no other rank or step has."""
        generator = torch.Generator().manual_seed((self.seed * 1000 + rank) * 100_000 + step)
        components = torch.randint(len(self.means), (num_frames,), generator=generator)
        noise = torch.randn(num_frames, NUM_INPUTS, generator=generator)
        return self.means[components] + noise, components % NUM_CLASSES

    def validation(self) -> tuple[Float[Tensor, "frames inputs"], Int64[Tensor, " frames"]]:
        """Return frames that no rank trains on."""
        return self.minibatch(0, 999, VALIDATION_FRAMES)


@torch.no_grad()
def validation_loss(
    model: nn.Module,
    weights: Mapping[str, Tensor],
    frames: tuple[Float[Tensor, "frames inputs"], Int64[Tensor, " frames"]],
) -> float:
    """Return the model's mean cross-entropy with other `weights`, in nats a frame."""
    logits = functional_call(model, dict(weights), (frames[0],))
    return float(nn.functional.cross_entropy(logits, frames[1]))
