"""Time what each trainer adds to a training step, beside a bare loop in the same processes.

torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.step_overhead [--rounds 5]
    [--model feed_forward | small_tensors | lstm] [--trainers Gtc OneBit ...]

Every rank trains a feed-forward network of 1.1 M parameters on 256 frames a step, on one core. Of
300 tensors of 64 elements, or the 24 M parameters of five LSTM layers of 768 units, gradients are
given instead, so that a step is the trainer's and the optimizer's alone.

A round takes 12 steps without a trainer and 12 with each, in turn. Printed are the medians of the
rounds' added milliseconds a step on rank 0, with their range, how many of GTC's steps of the same
round a step takes, and the bytes that leave a rank. Blocks are of 12 steps, so that each round has
one exchange of models. Ranks share this machine's cores and its memory for a link: on hosts of
their own exchanges take their links' time instead.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from training.distributed import collectives, process_group
from training.distributed.process_group import ProcessGroup
from training.settings.trainers import Bfloat16, TopK
from training.trainers import (
    AdPsgd,
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

NUM_STEPS, NUM_FRAMES, NUM_UNITS = 12, 256, 512
THRESHOLD = 1 / 64
TRAINERS: dict[str, Callable[..., Trainer]] = {
    "Synchronous": Synchronous,
    "Gtc": partial(Gtc, gradient_threshold=THRESHOLD),
    "OneBit": OneBit,
    "OneBit, double buffering": partial(OneBit, double_buffering=True),
    "Bmuf": partial(Bmuf, block_size=NUM_STEPS),
    "Bmuf, bfloat16": partial(Bmuf, block_size=NUM_STEPS, block_exchange=Bfloat16()),
    "Bmuf, top-k": partial(Bmuf, block_size=NUM_STEPS, block_exchange=TopK(density=0.1)),
    "Htm": partial(Htm, group_size=2, block_size=NUM_STEPS, gradient_threshold=THRESHOLD),
    "SparseLoco": partial(SparseLoco, block_size=NUM_STEPS),
    "DPsgd": DPsgd,
    "RandPsgd": partial(RandPsgd, seed=1),
    "D1dPsgd": D1dPsgd,
    "AdPsgd": partial(AdPsgd, seed=1),
}


@dataclass(frozen=True, slots=True)
class Round:
    """Round holds the milliseconds of a step, and the bytes that left this rank in it."""

    step_ms: float
    wire_bytes: float


class FeedForward:
    """FeedForward computes gradients of two layers."""

    def __init__(self) -> None:
        layers = (nn.Linear(NUM_UNITS, 1024), nn.ReLU(), nn.Linear(1024, NUM_UNITS))
        self.model = nn.Sequential(*layers)
        self._inputs = torch.randn(NUM_FRAMES, NUM_UNITS)

    def set_gradients(self) -> None:
        """Compute them."""
        self.model.zero_grad()
        (self.model(self._inputs).square().sum() / NUM_FRAMES).backward()  # type: ignore[no-untyped-call]


class GivenGradients:
    """GivenGradients copies the same gradients in each step, of which GTC sends a twentieth."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._gradients = [THRESHOLD / 16 * torch.randn_like(p) for p in model.parameters()]
        for p in model.parameters():
            p.grad = torch.zeros_like(p)

    def set_gradients(self) -> None:
        """Copy them."""
        targets = [p.grad for p in self.model.parameters() if p.grad is not None]
        torch._foreach_copy_(targets, self._gradients)


def small_tensors() -> GivenGradients:
    """Make 300 tensors of 64 elements, of three shapes in turn."""
    shapes = [((64,), (8, 8), (4, 16))[number % 3] for number in range(300)]
    return GivenGradients(nn.ParameterList(torch.randn(shape) for shape in shapes))


def lstm() -> GivenGradients:
    """Make the student's size, without its head: 21.9 M parameters."""
    return GivenGradients(nn.LSTM(192, 768, 5))


MODELS: dict[str, Callable[[], FeedForward | GivenGradients]] = {
    "feed_forward": FeedForward,
    "small_tensors": small_tensors,
    "lstm": lstm,
}


class Loop:
    """Loop trains one model, bare or with a trainer that is entered in each round."""

    def __init__(
        self,
        make_task: Callable[[], FeedForward | GivenGradients],
        make_trainer: Callable[..., Trainer] | None,
        group: ProcessGroup,
    ) -> None:
        torch.manual_seed(1)
        self.task = make_task()
        self.model = self.task.model
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.group = group
        self.trainer = (
            None if make_trainer is None else make_trainer(self.model, self.optimizer, group=group)
        )

    def run(self) -> Round:
        """Take a round's steps; entering and leaving are not timed."""
        if self.trainer is None:
            return Round(self._step_ms(), 0.0)
        with self.trainer:
            before = self.trainer.wire_bytes
            step_ms = self._step_ms()
            return Round(step_ms, (self.trainer.wire_bytes - before) / NUM_STEPS)

    def _step_ms(self) -> float:
        collectives.barrier(self.group)
        started = time.perf_counter()
        for _ in range(NUM_STEPS):
            self.task.set_gradients()
            self.optimizer.step()
        return 1000 * (time.perf_counter() - started) / NUM_STEPS


def main() -> None:
    """Take the rounds, then print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="rounds, after one that is dropped")
    parser.add_argument("--model", choices=MODELS, default="feed_forward")
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with process_group.open_world() as group:
        make_task = MODELS[arguments.model]
        loops = {"bare": Loop(make_task, None, group)}
        for name in dict.fromkeys(["Gtc", *arguments.trainers]):
            loops[name] = Loop(make_task, TRAINERS[name], group)
        rounds: dict[str, list[Round]] = {name: [] for name in loops}
        for number in range(arguments.rounds + 1):
            for name, loop in loops.items():
                found = loop.run()
                if number > 0:  # the first round makes memory
                    rounds[name].append(found)
        if group.rank() == 0:
            print(table(rounds, group.size()))


def table(rounds: dict[str, list[Round]], num_ranks: int) -> str:
    """Lay out medians and ranges, relative to the bare loop and to GTC of the same round."""
    bare, gtc = ([each.step_ms for each in rounds[name]] for name in ("bare", "Gtc"))
    lines = [
        f"{num_ranks} ranks; a bare step takes {spread(bare)} ms",
        "",
        "| trainer | added ms a step | times a step of GTC | kB that leave a rank, a step |",
        "| --- | --- | --- | --- |",
    ]
    for name in list(rounds)[1:]:
        added = [each.step_ms - without for each, without in zip(rounds[name], bare, strict=True)]
        times = [each.step_ms / of_gtc for each, of_gtc in zip(rounds[name], gtc, strict=True)]
        kilobytes = statistics.median(each.wire_bytes for each in rounds[name]) / 1000
        lines.append(f"| {name} | {spread(added)} | {spread(times)} | {kilobytes:,.1f} |")
    return "\n".join(lines)


def spread(values: list[float]) -> str:
    """Write median and range."""
    return f"{statistics.median(values):.1f} ({min(values):.1f}..{max(values):.1f})"


if __name__ == "__main__":
    main()
