"""Implement the papers' trainers as plain NumPy loops that share no code with training/."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Settings:
    """Settings holds the equations' symbols; each rank's optimizer is SGD with momentum."""

    group_size: int
    block_size: int
    tau: float
    eta: float
    zeta: float
    form: str
    learning_rate: float
    momentum: float

    def is_gtc(self, groups: np.ndarray) -> bool:
        """Return whether all ranks train one model, so that no block is filtered."""
        return len(groups) == 1 and self.group_size > 1


@dataclass(frozen=True)
class Trajectory:
    """Trajectory holds the ranks' models after each step, the final model and the residuals."""

    models: np.ndarray
    final: np.ndarray
    residuals: np.ndarray


def send(residual: np.ndarray, gradient: np.ndarray, tau: float) -> np.ndarray:
    """Quantize element by element (000 2.1); return the sent part, keep the rest in `residual`."""
    sent = np.zeros_like(residual)
    for element in range(len(residual)):
        residual[element] += gradient[element]
        if abs(residual[element]) >= tau:
            sent[element] = tau if residual[element] > 0 else -tau
            residual[element] -= sent[element]
    return sent


def group_gradient(residuals: np.ndarray, gradients: np.ndarray, tau: float) -> np.ndarray:
    """Sum the gradients of one group: unquantized if tau is 0, or in a group of one rank."""
    if tau == 0 or len(gradients) == 1:
        return gradients.sum(0)
    return sum(send(*of_rank, tau) for of_rank in zip(residuals, gradients, strict=True))


class Blocks:
    """Blocks computes eqs. (2) to (4) of paper 000: the global and broadcast models, the update."""

    def __init__(self, start: np.ndarray, settings: Settings) -> None:
        self.settings = settings
        self.evaluated = self.broadcast = start
        self.update = np.zeros_like(start)

    def end(self, mean_model: np.ndarray) -> None:
        """Filter the mean of the groups' models at the end of a block."""
        eta, zeta = self.settings.eta, self.settings.zeta
        self.update = eta * self.update + zeta * (mean_model - self.broadcast)
        if self.settings.form == "as_printed":
            self.evaluated = self.broadcast = self.broadcast + self.update + eta * self.update
        else:
            self.evaluated = self.evaluated + self.update
            self.broadcast = self.evaluated + eta * self.update


def train(start: np.ndarray, gradients: np.ndarray, settings: Settings) -> Trajectory:
    """Train by 000 2.3 on `gradients` (steps, ranks, elements); a last partial block ends too."""
    groups = np.arange(gradients.shape[1]).reshape(-1, settings.group_size)
    models = np.tile(start, (gradients.shape[1], 1))
    velocities, residuals = np.zeros_like(models), np.zeros_like(models)
    blocks = Blocks(start, settings)
    after_steps = []
    for step, of_ranks in enumerate(gradients):
        for ranks in groups:
            of_group = residuals[ranks]
            gradient = group_gradient(of_group, of_ranks[ranks], settings.tau)
            residuals[ranks] = of_group
            velocities[ranks] = settings.momentum * velocities[ranks] + gradient
            models[ranks] -= settings.learning_rate * velocities[ranks]
        if (step + 1) % settings.block_size == 0 and not settings.is_gtc(groups):
            blocks.end(models[groups[:, 0]].mean(0))
            models[:] = blocks.broadcast
        after_steps.append(models.copy())
    if len(gradients) % settings.block_size:
        blocks.end(models[groups[:, 0]].mean(0))
    final = models[0] if settings.is_gtc(groups) else blocks.evaluated
    return Trajectory(np.array(after_steps), final, residuals)
