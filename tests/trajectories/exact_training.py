"""Run short trainings whose every bit follows from IEEE 754, on any processor.

No sum depends on a processor's vector width: the model works element by element. Its gradients are
small integers over 8; learning rates, momenta and the number of ranks are powers of two, so that a
fused multiply-add rounds as a multiplication and an addition do. Roundings remain (division, square
root, block momentum 3/4, models of many bits), one an operation. torch takes square roots from MKL,
whose last bit depends on the processor, so they come from NumPy here.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks
from training.settings.trainers import TopK
from training.trainers import (
    Bmuf,
    D1dPsgd,
    DPsgd,
    Gtc,
    Htm,
    OneBit,
    RandPsgd,
    SparseLoco,
    Synchronous,
    Trainer,
)

NUM_RANKS, NUM_STEPS, NUM_FRAMES = 4, 30, 8
NUM_INPUTS, NUM_OUTPUTS = 5, 3
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=2.0**-6, momentum=0.5),
    "adam": partial(torch.optim.Adam, lr=2.0**-5, betas=(0.5, 0.75)),
    "plain": partial(torch.optim.SGD, lr=2.0**-6),
}
TRAINERS: dict[str, Callable[..., Trainer]] = {
    "synchronous": Synchronous,
    "gtc": partial(Gtc, gradient_threshold=4.0),
    "bmuf_nesterov": partial(Bmuf, block_size=4),
    "bmuf_as_printed": partial(Bmuf, block_size=4, form="as_printed"),
    "bmuf_top_k": partial(Bmuf, block_size=4, block_exchange=TopK(density=0.3, bits=3)),
    "sparse_loco": partial(SparseLoco, block_size=4, density=0.3, error_decay=0.75),
    "htm": partial(Htm, group_size=2, block_size=4, gradient_threshold=4.0),
    "d_psgd": DPsgd,
    "rand_psgd": partial(RandPsgd, mixing_seed=5),
    "d1d_psgd": D1dPsgd,
    "one_bit": partial(OneBit, momentum=0.5, num_unquantized_steps=6),
    "one_bit_double": partial(OneBit, momentum=0.5, num_unquantized_steps=6, double_buffering=True),
}


@dataclass(frozen=True)
class Step:
    """Step holds the digest and the sum of moduli of all ranks' models after a step."""

    digest: str
    norm: float


@dataclass(frozen=True)
class Trajectory:
    """Trajectory holds a training's steps, its final model, and all ranks' state at the end."""

    steps: list[Step]
    final: list[float]
    state_digest: str


class Elementwise(nn.Module):
    """Compute one output for each pair of an input and a unit, without a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(NUM_INPUTS, NUM_OUTPUTS))
        self.bias = nn.Parameter(torch.zeros(NUM_OUTPUTS))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.unsqueeze(2) * self.weight + self.bias


def minibatch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return small integers from a formula: torch's random numbers may change with its version."""
    frame = torch.arange(NUM_FRAMES).view(-1, 1) + NUM_FRAMES * (NUM_RANKS * step + rank)
    inputs = (frame * 7 + torch.arange(NUM_INPUTS) * 3 + frame * frame // 5) % 7 - 3
    noise = (frame * 5 + torch.arange(NUM_OUTPUTS) * 11 + frame * frame // 3) % 9 - 4
    targets = torch.arange(NUM_OUTPUTS) - 1 + inputs.unsqueeze(2) + noise.unsqueeze(1) / 4
    return inputs.float(), targets


def train_rank(
    group: ProcessGroup, trainer_name: str, optimizer_name: str
) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """Return one rank's models after each step, its final model, and its state before that."""
    model = Elementwise()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    models = []
    trainer = TRAINERS[trainer_name](model, optimizer, group=group)
    with trainer:
        for step in range(NUM_STEPS):
            inputs, targets = minibatch(step, group.rank())
            optimizer.zero_grad()
            # The products of integers and the signs of errors, and their sums, are exact.
            ((model(inputs) - targets).abs().sum() / 8).backward()
            optimizer.step()
            models.append(weights(model))
        state = {**trainer.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    return models, weights(model), state


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Round each operation once, also those that a processor may fuse or MKL computes."""

    def sqrt_(values: Tensor) -> Tensor:
        return values.copy_(correctly_rounded_sqrt(values))

    def addcmul_(total: Tensor, first: Tensor, second: Tensor, value: float = 1) -> Tensor:
        return total.add_(first * second * value)

    replaced = {"sqrt": correctly_rounded_sqrt, "sqrt_": sqrt_, "addcmul_": addcmul_}
    with patch.multiple(Tensor, **replaced):
        yield


def correctly_rounded_sqrt(values: Tensor) -> Tensor:
    return torch.from_numpy(np.sqrt(values.numpy()))


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def train(trainer_name: str, optimizer_name: str) -> Trajectory:
    """Train on simulated ranks, which have the bits of real ones (test_simulated_group.py)."""
    with exact_arithmetic():
        ranks = simulate_ranks(NUM_RANKS, train_rank, trainer_name, optimizer_name)
    models = [torch.cat(models) for models in zip(*(models for models, _, _ in ranks), strict=True)]
    steps = [Step(digest(model), math.fsum(model.abs().tolist())) for model in models]
    state = torch.cat([piece for _, _, state in ranks for piece in tensors(state)])
    return Trajectory(steps, ranks[0][1].tolist(), digest(state))


def tensors(state: object) -> list[Tensor]:
    """Return all tensors of a nested state, in the order of their names."""
    if isinstance(state, Tensor):
        return [state.reshape(-1).float()]
    if isinstance(state, dict):
        return [piece for key in sorted(state, key=str) for piece in tensors(state[key])]
    return []


def digest(values: Tensor) -> str:
    """Return the first digits of the SHA-256 of little-endian float32."""
    return hashlib.sha256(values.numpy().astype("<f4").tobytes()).hexdigest()[:16]
