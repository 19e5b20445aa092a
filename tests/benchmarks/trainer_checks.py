"""Time the share of a training step in which a trainer compares ranks and looks for NaN.

`python -m tests.benchmarks.trainer_checks [--frames N] [--steps N] [--models 24M 1M] [--json]`. One
rank trains LSTMs on one core by every trainer, with clipped gradients as the jobs do; the process's
own time counts. The share falls with the frames of a minibatch, as only the rest of the step grows
with them; the papers' have 2048. `--without-clipping` leaves gradients out of the cache.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from tests.benchmarks.measure import Figure, show
from training.distributed import process_group
from training.distributed.checks import Comparison, FiniteCheck, FirstFault
from training.trainers import Bmuf, Gtc, Htm, OneBit, Synchronous, Trainer, replica
from training.trainers.replica import TrainedSet
from training.trainers.trainer import STEPS_BETWEEN_COMPARISONS

TRAINERS: dict[str, Callable[..., Trainer]] = {
    "Synchronous": Synchronous,
    "Gtc": partial(Gtc, gradient_threshold=8 / 2048),
    "Bmuf": partial(Bmuf, block_size=STEPS_BETWEEN_COMPARISONS),
    "Htm": partial(
        Htm, group_size=1, block_size=STEPS_BETWEEN_COMPARISONS, gradient_threshold=2 / 2048
    ),
    "OneBit": OneBit,
}
MODELS = {"24M": (5, 768), "1M": (2, 256)}
COMPARING = [
    (TrainedSet, "check"),
    (TrainedSet, "note_rates"),
    (replica, "_check_optimizer"),
    (Trainer, "_digests"),
    (Trainer, "_replica"),
    (Comparison, "__init__"),
    (Comparison, "check"),
]
LOOKING = [
    (FiniteCheck, "examine"),
    (FiniteCheck, "check"),
    (FirstFault, "note"),
]


class Clock:
    """Clock adds up the seconds in the outermost of the functions that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            started = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.process_time() - started

        return timed

    @contextmanager
    def of(self, checks: list[tuple[Any, str]]) -> Iterator[None]:
        with ExitStack() as stack:
            for place, name in checks:
                stack.enter_context(patch.object(place, name, self.timed(getattr(place, name))))
            yield


class Network(nn.Module):
    """Network has LSTM layers on features of 192 dimensions, and one output for each frame."""

    def __init__(self, num_layers: int, num_units: int) -> None:
        super().__init__()
        self.layers = nn.LSTM(192, num_units, num_layers, batch_first=True)
        self.output = nn.Linear(num_units, 3000)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.output(self.layers(features)[0]).square().mean()


def share_of(
    trainer: str, size: tuple[int, int], num_frames: int, num_steps: int, is_clipping: bool
) -> list[Figure]:
    """Return the share of checks in `num_steps` steps, and the milliseconds of a step."""
    momentum = 0.0 if trainer == "OneBit" else 0.9  # 1-bit SGD has it itself
    model, comparing, looking = Network(*size), Clock(), Clock()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=momentum)
    features = torch.randn(num_frames // 32, 32, 192)
    with (
        process_group.open_world() as group,
        comparing.of(COMPARING),
        looking.of(LOOKING),
        TRAINERS[trainer](model, optimizer, group=group),
    ):
        for step in range(1 + num_steps):
            if step == 1:  # the first step makes memory
                comparing.seconds = looking.seconds = 0.0
                started = time.process_time()
            optimizer.zero_grad()
            model(features).backward()
            if is_clipping:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        seconds = time.process_time() - started
        shares = [100 * clock.seconds / seconds for clock in (comparing, looking)]
    return [
        Figure.of(f"{trainer}: comparing ranks", shares[:1], "% of the step"),
        Figure.of(f"{trainer}: looking for NaN", shares[1:], "% of the step"),
        Figure.of(f"{trainer}: step", [1e3 * seconds / num_steps], "ms"),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=256)
    parser.add_argument("--steps", type=int, default=STEPS_BETWEEN_COMPARISONS)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--without-clipping", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in arguments.models:
        size = MODELS[name]
        measured = [
            figure
            for trainer in TRAINERS
            for figure in share_of(
                trainer, size, arguments.frames, arguments.steps, not arguments.without_clipping
            )
        ]
        title = f"{name} parameters, {arguments.frames} frames a step, {arguments.steps} steps"
        show(title, measured, arguments.json)
