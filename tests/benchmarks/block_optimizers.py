"""Compare optimizers under block momentum: held-out losses of 64 simulated ranks.

python -m tests.benchmarks.block_optimizers [--seeds 3] [--device cuda] [--resume FILE]

SGD with momentum, Adam and AdamW under BMUF (64 models, block momentum 0.984 by 000 eq. 5) and HTM
(8 groups, 0.875), from a network that one rank has trained on an eighth of the frames (000 3.2),
and for BMUF from random weights too. Learning rates of SGD and Adam are the best of three for the
first seed; AdamW has Adam's. `one rank` sees the same frames, one minibatch after the other. With
--device cuda the ranks share the GPU; give it a --resume file of its own.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from tqdm import tqdm

from tests.benchmarks.simulated_task import MINIBATCH_FRAMES, SimulatedTask, new_model
from training.simulation import CPU, simulate
from training.trainers import Bmuf, Htm, Synchronous, Trainer

NUM_RANKS, STEPS_PER_EPOCH = 64, 24
RATE_FACTORS = (1.0, 0.3, 0.1)
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, momentum=0.9),
    "adam": Adam,
    "adamw": AdamW,
}
TRAINERS: dict[str, tuple[int, Callable[..., Trainer]]] = {
    "one rank": (1, Synchronous),
    "bmuf": (NUM_RANKS, partial(Bmuf, block_size=2)),
    "htm": (NUM_RANKS, partial(Htm, block_size=2, group_size=8, gradient_threshold=2 / 64)),
}
# Under BMUF the updates of 64 ranks add up, under HTM those of 8 groups.
RATES = {
    ("one rank", "sgd"): (0.01, 0.03, 0.1),
    ("bmuf", "sgd"): (3e-4, 1e-3, 3e-3),
    ("bmuf", "adam"): (1e-4, 3e-4, 1e-3),
    ("htm", "sgd"): (3e-4, 1e-3, 3e-3),
    ("htm", "adam"): (3e-4, 1e-3, 3e-3),
}


@dataclass(frozen=True)
class Configuration:
    """Configuration is a row of the table; `start` is "pretrained" or "random"."""

    trainer: str
    optimizer: str
    start: str = "pretrained"


@dataclass(frozen=True)
class Job:
    """Job is one training."""

    configuration: Configuration
    rate: float
    seed: int


TUNED = [Configuration(*names) for names in RATES]
CONFIGURATIONS = [
    *TUNED,
    *(Configuration(trainer, "adamw") for trainer in ("bmuf", "htm")),
    *(Configuration("bmuf", name, "random") for name in OPTIMIZERS),
]


class Losses:
    """Losses keeps the held-out losses after each epoch, in memory and in a JSON-lines file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.of: dict[Job, list[float]] = {}
        for line in path.read_text().splitlines() if path and path.exists() else []:
            document = json.loads(line)
            configuration = Configuration(**document["job"].pop("configuration"))
            self.of[Job(configuration, **document["job"])] = document["losses"]

    def add(self, job: Job, losses: Sequence[float]) -> None:
        """Keep what a training gave."""
        self.of[job] = list(losses)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps({"job": asdict(job), "losses": self.of[job]}) + "\n")

    def best_rate(self, configuration: Configuration) -> float:
        """Return the best rate of the first seed."""
        optimizer = configuration.optimizer.removesuffix("w")
        tuned = Configuration(configuration.trainer, optimizer)
        rates = RATES[configuration.trainer, optimizer]
        return min(rates, key=lambda rate: self.of[Job(tuned, rate, 1)][-1])


def train(
    task: SimulatedTask, pretrained: nn.Module, job: Job, device: torch.device
) -> Sequence[float]:
    """Return the held-out losses after each epoch; that of the start is the first."""
    num_ranks, make_trainer = TRAINERS[job.configuration.trainer]
    torch.manual_seed(job.seed)
    start = pretrained if job.configuration.start == "pretrained" else new_model()
    rates = tuple(job.rate * factor for factor in RATE_FACTORS)

    def make_optimizer(model: nn.Module) -> Optimizer:
        return OPTIMIZERS[job.configuration.optimizer](model.parameters(), lr=job.rate)

    training = task.training(start, make_optimizer, rates)
    outcome = simulate(training, num_ranks, make_trainer, device)
    return [task.heldout_loss(start), *outcome.evaluations]


def main() -> None:
    """Train what is not finished, and print the table."""
    arguments = parsed()
    torch.set_num_threads(1)
    losses = Losses(arguments.resume)
    for seed in range(1, arguments.seeds + 1):
        task = SimulatedTask.of(seed, NUM_RANKS * STEPS_PER_EPOCH * MINIBATCH_FRAMES)
        pretrained = task.pretrained()
        for configuration in tqdm(CONFIGURATIONS, desc=f"seed {seed}"):
            is_tuning = seed == 1 and configuration in TUNED
            rates = RATES[configuration.trainer, configuration.optimizer] if is_tuning else ()
            for rate in rates or (losses.best_rate(configuration),):
                job = Job(configuration, rate, seed)
                if job not in losses.of:
                    losses.add(job, train(task, pretrained, job, arguments.device))
        print(as_text(losses, seed))


def parsed() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", type=torch.device, default=CPU, help="cpu, cuda or cuda:N")
    parser.add_argument("--resume", type=Path, help="JSON-lines file that keeps what is finished")
    return parser.parse_args()


def as_text(losses: Losses, num_seeds: int) -> str:
    """Lay out the table as Markdown: means over the seeds, and the range of the last."""
    head = [
        "trainer",
        "optimizer",
        "start",
        "rate",
        "at the start",
        "epoch 1",
        "epoch 2",
        "epoch 3",
    ]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for each in CONFIGURATIONS:
        rate = losses.best_rate(each)
        curves = [losses.of[Job(each, rate, seed)] for seed in range(1, num_seeds + 1)]
        means = [f"{statistics.mean(values):.3f}" for values in zip(*curves, strict=True)]
        means[-1] += f" ({min(c[-1] for c in curves):.3f}..{max(c[-1] for c in curves):.3f})"
        lines.append(
            "| "
            + " | ".join([each.trainer, each.optimizer, each.start, f"{rate:g}", *means])
            + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
