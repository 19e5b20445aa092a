"""A task for simulated ranks that needs no data: classify frames as a random network does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.optim import Optimizer

from training.simulation import Training

NUM_INPUTS, NUM_UNITS, NUM_CLASSES = 32, 48, 24
MINIBATCH_FRAMES, HELDOUT_FRAMES = 32, 8192
NOISE = 0.5
PRETRAINING_PART, PRETRAINING_RATE = 8, 0.1
Minibatch = tuple[Float[Tensor, "frames inputs"], Int64[Tensor, " frames"]]


@dataclass(frozen=True)
class SimulatedTask:
    """SimulatedTask holds the frames of a seed: those to train on, and the held-out ones."""

    seed: int
    inputs: Float[Tensor, "frames inputs"]
    labels: Int64[Tensor, " frames"]
    heldout: Minibatch

    @classmethod
    def of(cls, seed: int, num_frames: int) -> "SimulatedTask":
        """Draw frames, and label them by a random network with noise on its outputs."""
        torch.manual_seed(seed)
        labeller = new_model()
        inputs = torch.randn(num_frames + HELDOUT_FRAMES, NUM_INPUTS)
        with torch.no_grad():
            logits = 8 * labeller(inputs)
        labels = (logits + NOISE * torch.randn_like(logits)).argmax(dim=1)
        heldout = inputs[num_frames:], labels[num_frames:]
        return cls(seed, inputs[:num_frames], labels[:num_frames], heldout)

    def pretrained(self) -> nn.Module:
        """Train one rank once on an eighth of the frames (000 3.2: 250 of 2,000 hours)."""
        torch.manual_seed(self.seed + 1)
        model = new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=PRETRAINING_RATE, momentum=0.9)
        order = torch.randperm(len(self.labels) // PRETRAINING_PART)
        for numbers in torch.split(order, MINIBATCH_FRAMES):
            optimizer.zero_grad()
            loss(model, (self.inputs[numbers], self.labels[numbers])).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        return model

    def training(
        self,
        start: nn.Module,
        make_optimizer: Callable[[nn.Module], Optimizer],
        learning_rates: tuple[float, ...],
    ) -> Training[Minibatch]:
        """Train from `start`; in each epoch every frame is on one rank."""

        def make_model() -> nn.Module:
            model = new_model()
            model.load_state_dict(start.state_dict())
            return model

        def minibatches(epoch: int, rank: int, num_ranks: int) -> Iterator[Minibatch]:
            generator = torch.Generator().manual_seed(1000 * self.seed + epoch)
            own = torch.randperm(len(self.labels), generator=generator)[rank::num_ranks]
            for numbers in torch.split(own, MINIBATCH_FRAMES):
                yield self.inputs[numbers], self.labels[numbers]

        return Training(
            make_model, make_optimizer, minibatches, loss, self.heldout_loss, learning_rates
        )

    def heldout_loss(self, model: nn.Module) -> float:
        """Return the mean cross-entropy of the held-out frames."""
        device = next(model.parameters()).device
        inputs, labels = (each.to(device) for each in self.heldout)
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(inputs), labels))


def new_model() -> nn.Module:
    """Make a network of one hidden layer, from torch's random state."""
    return nn.Sequential(
        nn.Linear(NUM_INPUTS, NUM_UNITS), nn.Tanh(), nn.Linear(NUM_UNITS, NUM_CLASSES)
    )


def loss(model: nn.Module, minibatch: Minibatch) -> Float[Tensor, ""]:
    """Return the cross-entropy, a sum over frames divided by the nominal minibatch."""
    inputs, labels = minibatch
    total = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
    return total / MINIBATCH_FRAMES
