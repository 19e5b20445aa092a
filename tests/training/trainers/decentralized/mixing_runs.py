"""Train quadratics on ranks of decentralized SGD, and the same by the papers' matrices in NumPy."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from training.trainers import AdPsgd, D1dPsgd, DPsgd, RandPsgd
from training.trainers.decentralized import OwnModels

SEED = 5
NUM_WEIGHTS = 6
MakeOwnModels = Callable[..., OwnModels]
TRAINERS: dict[str, MakeOwnModels] = {
    "d_psgd": DPsgd,
    "rand_psgd": partial(RandPsgd, mixing_seed=SEED),
    "d1d_psgd": D1dPsgd,
    "ad_psgd": partial(AdPsgd, mixing_seed=SEED),
}
Weights = Float64[np.ndarray, "weights ranks"]


class Vector(nn.Module):
    """Vector is a model of some weights in float64, so that equations hold to 1e-12."""

    def __init__(self, num_weights: int = NUM_WEIGHTS) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.ones(num_weights, dtype=torch.float64))


@dataclass(frozen=True)
class Quadratics:
    """Quadratics holds a loss of each rank and step, w' A w / 2 - b' w, with gradient A w - b."""

    seed: int

    def matrix(
        self, rank: int, step: int
    ) -> tuple[Float64[np.ndarray, "n n"], Float64[np.ndarray, " n"]]:
        """Return A, symmetric and positive, and b."""
        generator = np.random.default_rng([self.seed, rank, step])
        root = generator.normal(size=(NUM_WEIGHTS, NUM_WEIGHTS)) / 3
        return root @ root.T, generator.normal(size=NUM_WEIGHTS)

    def gradients(self, models: Weights, step: int) -> Weights:
        """Return each rank's gradient at its own column."""
        columns = []
        for rank in range(models.shape[1]):
            curvature, slope = self.matrix(rank, step)
            columns.append(curvature @ models[:, rank] - slope)
        return np.stack(columns, axis=1)

    def loss(self, weights: Tensor, rank: int, step: int) -> Tensor:
        """Return a rank's loss, for autograd."""
        curvature, slope = map(torch.from_numpy, self.matrix(rank, step))
        return weights @ curvature @ weights / 2 - slope @ weights


def own_models(
    group: ProcessGroup, name: str, rate: float, num_steps: int
) -> tuple[list[Tensor], Tensor]:
    """Return a rank's own model after each step, and the model that leaving gives."""
    model = Vector()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    trainer = TRAINERS[name](model, optimizer, group=group)
    seen = []
    with trainer:
        for step in range(num_steps):
            optimizer.zero_grad()
            Quadratics(SEED).loss(model.weights, group.rank(), step).backward()
            optimizer.step()
            seen.append(trainer.own_model())
    return seen, model.weights.detach().clone()


def spread_then_mix(
    group: ProcessGroup, make_trainer: MakeOwnModels, first_models: Weights, num_rounds: int
) -> list[Tensor]:
    """Move each rank to its column by one step, then mix alone; return its models since then."""
    model = Vector(len(first_models))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = make_trainer(model, optimizer, group=group)
    seen = []
    with trainer:
        for step in range(num_rounds + 1):
            target = torch.from_numpy(first_models[:, group.rank()].copy())
            # A step of rate 1 along w - target ends at the target; later gradients are zeros.
            gradient = (model.weights - target).detach() if step == 0 else torch.zeros_like(target)
            optimizer.zero_grad()
            (model.weights * gradient).sum().backward()
            optimizer.step()
            seen.append(trainer.own_model())
    return seen


def distance(models: list[Tensor]) -> float:
    """Return the consensus distance of the ranks' models, ||W - W T_u||_F."""
    columns = torch.stack(models)
    return float(torch.linalg.matrix_norm(columns - columns.mean(0)))
