"""Compare what a block's end may do about ranks with less data: BMUF's and HTM's held-out losses.

python -m tests.benchmarks.uneven_ranks [--seeds 3] [--resume FILE]

Eight simulated ranks, of which two have no data, a tenth of it, or a tenth and classes of their
own. `plain` is the mean of all models, empty steps included; `weighted` weights a model by the
frames that it was trained on in the block; `holding` undoes the steps that a rank takes without
data, so that momentum alone moves nothing. Learning rates are the best of five for the first seed.
"""

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from tqdm import tqdm

from tests.benchmarks.simulated_task import MINIBATCH_FRAMES, NUM_CLASSES, Minibatch, SimulatedTask
from training.distributed.collectives import gather_equal
from training.simulation import simulate
from training.trainers import Bmuf, Htm

NUM_RANKS, NUM_SHORT, NUM_STEPS, NUM_EPOCHS = 8, 2, 32, 3
RATE_FACTORS = (1.0, 0.3, 0.1)
BLOCK_SIZE, GRADIENT_THRESHOLD = 4, 2 / 64
PARTS = {
    "all equal": 1.0,
    "two without data": 0.0,
    "two with a tenth": 0.1,
    "two with a tenth, of own classes": 0.1,
}
RATES = {
    "sgd": (0.0005, 0.0015, 0.005, 0.015, 0.05),
    "adam": (0.00015, 0.0005, 0.0015, 0.005, 0.015),
}
OPTIMIZERS = {"sgd": partial(SGD, momentum=0.9), "adam": Adam}


class FrameCounts:
    """FrameCounts holds the frames that each rank has trained on, in its block and in its step."""

    def __init__(self) -> None:
        self.of_block: Counter[int] = Counter()
        self.of_step: Counter[int] = Counter()

    def note(self, rank: int, num_frames: int) -> None:
        self.of_block[rank] += num_frames
        self.of_step[rank] = num_frames


class WeightedBmuf(Bmuf):
    """WeightedBmuf averages models by their ranks' or groups' shares of the block's frames."""

    frames: FrameCounts

    def average(self, values: Tensor) -> None:
        own = torch.tensor([self.frames.of_block.pop(self.group.rank(), 0)], dtype=torch.int32)
        counts = gather_equal(own, self.group, "frames").flatten()
        of_models = counts.view(self.num_models, -1).sum(dim=1)
        if total := int(of_models.sum()):
            model = self.group.rank() * self.num_models // self.group.size()
            values *= int(of_models[model]) * self.num_models / total
        super().average(values)


class HoldingBmuf(Bmuf):
    """HoldingBmuf undoes a rank's steps without data."""

    frames: FrameCounts

    def exchange_gradients(self) -> None:
        super().exchange_gradients()
        self._before = self.parameters.weights()

    def end_step(self) -> None:
        if not self.frames.of_step[self.group.rank()]:
            self.parameters.set_weights(self._before)
        super().end_step()


class WeightedHtm(WeightedBmuf, Htm):
    """WeightedHtm weights groups; a rank without data already adds nothing to its group's sums."""


RULES: dict[str, dict[str, type[Bmuf]]] = {
    "bmuf": {"plain": Bmuf, "weighted": WeightedBmuf, "holding": HoldingBmuf},
    "htm": {"plain": Htm, "weighted": WeightedHtm},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "bmuf": {"block_size": BLOCK_SIZE},
    "htm": {"block_size": BLOCK_SIZE, "group_size": 2, "gradient_threshold": GRADIENT_THRESHOLD},
}


@dataclass(frozen=True)
class Configuration:
    """Configuration is a row of the table."""

    data: str
    trainer: str
    optimizer: str
    rule: str


@dataclass(frozen=True)
class Job:
    """Job is one training."""

    configuration: Configuration
    rate: float
    seed: int


CONFIGURATIONS = [
    Configuration(data, trainer, optimizer, rule)
    for data, trainer, optimizer in product(PARTS, RULES, OPTIMIZERS)
    for rule in RULES[trainer]
    if rule == "plain" or data != "all equal"
]


def frames_of(task: SimulatedTask, data: str, rank: int) -> Tensor:
    """Return the numbers of a rank's frames."""
    num_frames = NUM_STEPS * MINIBATCH_FRAMES
    is_short = rank >= NUM_RANKS - NUM_SHORT
    part = int(num_frames * PARTS[data]) if is_short else num_frames
    numbers = torch.arange(len(task.labels))
    if data.endswith("classes"):
        is_own = task.labels >= NUM_CLASSES * (NUM_RANKS - NUM_SHORT) // NUM_RANKS
        numbers = numbers[is_own == is_short]
    return numbers[rank::NUM_RANKS][:part]


def train(task: SimulatedTask, start: nn.Module, job: Job) -> float:
    """Return the held-out loss at the end."""
    frames = FrameCounts()

    def minibatches(epoch: int, rank: int, num_ranks: int) -> Iterator[Minibatch]:
        del num_ranks
        own = frames_of(task, job.configuration.data, rank)
        generator = torch.Generator().manual_seed(1000 * job.seed + 10 * epoch + rank)
        own = own[torch.randperm(len(own), generator=generator)]
        for step in range(NUM_STEPS):
            numbers = own[step * MINIBATCH_FRAMES :][:MINIBATCH_FRAMES]
            frames.note(rank, len(numbers))
            yield task.inputs[numbers], task.labels[numbers]

    def make_trainer(model: nn.Module, optimizer: Optimizer, **group: Any) -> Bmuf:
        trainer = RULES[job.configuration.trainer][job.configuration.rule](
            model, optimizer, **group, **SETTINGS[job.configuration.trainer]
        )
        trainer.frames = frames  # type: ignore[attr-defined]
        return trainer

    rates = tuple(job.rate * factor for factor in RATE_FACTORS)
    training = task.training(
        start,
        lambda model: OPTIMIZERS[job.configuration.optimizer](model.parameters(), lr=job.rate),
        rates,
    )
    outcome = simulate(replace(training, minibatches=minibatches), NUM_RANKS, make_trainer)
    return outcome.evaluations[-1]


def main() -> None:
    """Train what is not finished, and print the table."""
    arguments = parsed()
    torch.set_num_threads(1)
    losses = read_losses(arguments.resume)
    for seed in range(1, arguments.seeds + 1):
        task = SimulatedTask.of(seed, 2 * NUM_RANKS * NUM_STEPS * MINIBATCH_FRAMES)
        start = task.pretrained()
        for each in tqdm(CONFIGURATIONS, desc=f"seed {seed}"):
            for rate in RATES[each.optimizer] if seed == 1 else (best_rate(losses, each),):
                job = Job(each, rate, seed)
                if job not in losses:
                    losses[job] = train(task, start, job)
                    keep(arguments.resume, job, losses[job])
        print(as_text(losses, seed))


def read_losses(path: Path | None) -> dict[Job, float]:
    """Read the losses of finished trainings."""
    losses: dict[Job, float] = {}
    for line in path.read_text().splitlines() if path and path.exists() else []:
        document = json.loads(line)
        configuration = Configuration(**document["job"].pop("configuration"))
        losses[Job(configuration, **document["job"])] = document["loss"]
    return losses


def keep(path: Path | None, job: Job, loss: float) -> None:
    """Append a finished training."""
    if path:
        with path.open("a") as file:
            file.write(json.dumps({"job": asdict(job), "loss": loss}) + "\n")


def best_rate(losses: Mapping[Job, float], each: Configuration) -> float:
    """Return the best rate of the first seed."""
    return min(RATES[each.optimizer], key=lambda rate: losses[Job(each, rate, 1)])


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--resume", type=Path, help="JSON-lines file that keeps what is finished")
    return parser.parse_args()


def as_text(losses: Mapping[Job, float], num_seeds: int) -> str:
    """Lay out the table as Markdown: means over the seeds, and their range."""
    lines = ["| data | trainer | optimizer | rule | rate | held-out loss |", "| --- " * 6 + "|"]
    for each in CONFIGURATIONS:
        rate = best_rate(losses, each)
        values = [losses[Job(each, rate, seed)] for seed in range(1, num_seeds + 1)]
        text = f"{statistics.mean(values):.4f} ({min(values):.4f}..{max(values):.4f})"
        cells = [each.data, each.trainer, each.optimizer, each.rule, f"{rate:g}", text]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
