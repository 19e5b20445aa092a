"""Take the virtual time to a held-out loss of GTC, BMUF and HTM, simulated (000 Tables 1, 2).

python -m tests.benchmarks.convergence_time [--frames N]

A network of one hidden layer learns the labels that another, of random weights, gives random
inputs. All trainings go on from a model that one rank has trained (000 3.2). The target is the
held-out loss that one rank reaches with half of the frames. Others have twice as many to reach it;
their steps until then, times the seconds that the cost model says for a step of paper 000's model
and cluster, are their virtual time. Blocks of 4 steps stand for the paper's of 50.
"""

import argparse
import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.optim import SGD

from jobs.scaling import read_scaling
from training.cost_model.step_time import CostModel, ScalingWorkload
from training.distributed import collectives
from training.distributed.simulated_group import SimulatedGroup, simulate_ranks
from training.trainers import Bmuf, Gtc, Htm, Synchronous, Trainer

NUM_INPUTS, NUM_UNITS, NUM_CLASSES = 32, 48, 32
NUM_HELD_OUT = 4096
MINIBATCH_FRAMES = 8
GROUP_SIZE = 8
STEPS_OF_50 = 4
"""Steps of a block that stands for the paper's of 50."""
PRETRAINED_PART = 8
"""The start has seen an eighth of the frames (000 3.2: 250 of 2,000 hours)."""
ONE_RANK_RATE = 0.04
SEEDS = (1, 2, 3)
TUNING_SEED, TUNING_RANKS = 0, 64
RATES = {"GTC": (0.8, 1.6), "BMUF": (0.04,), "HTM": (0.2, 0.4)}
"""Rates of the mean gradient of the ranks that sum theirs, tried at 64 ranks."""
THRESHOLDS = {"GTC": 8 / 64, "HTM": 2 / 64}

PAPER = {
    ("GTC", 16, 50): (12.5, 21.0),
    ("GTC", 32, 50): (23.5, 26.3),
    ("GTC", 64, 50): (21.7, 17.4),
    ("GTC", 128, 50): (10.9, 10.8),
    ("BMUF", 16, 50): (15.7, 20.5),
    ("BMUF", 32, 50): (28.1, 36.6),
    ("BMUF", 64, 50): (58.2, 56.9),
    ("BMUF", 128, 25): (91.3, 91.2),
    ("BMUF", 128, 50): (101.5, 80.4),
    ("BMUF", 128, 100): (106.5, 64.5),
    ("BMUF", 128, 200): (110.3, 57.4),
    ("HTM", 16, 50): (13.9, 18.2),
    ("HTM", 32, 50): (24.2, 31.0),
    ("HTM", 64, 50): (49.2, 42.3),
    ("HTM", 128, 25): (77.9, 101.3),
    ("HTM", 128, 50): (97.8, 97.4),
    ("HTM", 128, 100): (99.6, 80.5),
    ("HTM", 128, 200): (105.5, 73.5),
}
"""Trainer, ranks and block size: the published speed-ups in frames a second and in convergence."""


Frames = tuple[Float[Tensor, "frames inputs"], Int64[Tensor, " frames"]]


@dataclass(frozen=True)
class Task:
    """Task holds labelled frames, and others that are held out."""

    seed: int
    training: Frames
    held_out: Frames

    @classmethod
    def of(cls, seed: int, num_frames: int) -> "Task":
        """Label random inputs by a network of random weights, at its best class."""
        torch.manual_seed(1000 + seed)
        labeller = network(NUM_UNITS)
        inputs = torch.randn(num_frames + NUM_HELD_OUT, NUM_INPUTS)
        with torch.no_grad():
            labels = labeller(2 * inputs).argmax(dim=1)
        held_out = inputs[:NUM_HELD_OUT], labels[:NUM_HELD_OUT]
        return cls(seed, (inputs[NUM_HELD_OUT:], labels[NUM_HELD_OUT:]), held_out)

    def minibatch(self, number: int) -> Frames:
        """Return minibatch `number`."""
        chosen = slice(number * MINIBATCH_FRAMES, (number + 1) * MINIBATCH_FRAMES)
        inputs, labels = self.training
        return inputs[chosen], labels[chosen]

    def held_out_loss(self, model: nn.Module) -> float:
        """Return the mean cross-entropy of the held-out frames."""
        inputs, labels = self.held_out
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model(inputs), labels))


def network(num_units: int) -> nn.Module:
    """Make a network of one hidden layer."""
    layers = nn.Linear(NUM_INPUTS, num_units), nn.Tanh(), nn.Linear(num_units, NUM_CLASSES)
    return nn.Sequential(*layers)


Curve = list[tuple[int, float]]
"""Steps, and the held-out loss of the model that would be evaluated after them."""


def train(
    group: SimulatedGroup,
    task: Task,
    start: nn.Module,
    make_trainer: Callable[..., Trainer],
    rate: float,
    num_steps: int,
    evaluate_every: int,
    target: float = 0.0,
) -> Curve:
    """Train one of the ranks, until rank 0 is at the target; rank 0 returns the curve."""
    model = copy.deepcopy(start)
    optimizer = SGD(model.parameters(), lr=rate)
    curve = [(0, task.held_out_loss(model))] if group.rank() == 0 else []
    with make_trainer(model, optimizer, group=group) as trainer:
        for step in range(num_steps):
            inputs, labels = task.minibatch(step * group.size() + group.rank())
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if (step + 1) % evaluate_every == 0:
                with trainer.evaluated_model():
                    if group.rank() == 0:
                        curve.append((step + 1, task.held_out_loss(model)))
                reached = torch.tensor([bool(curve) and curve[-1][1] <= target])
                collectives.broadcast(reached, group)
                if reached:
                    break
    return curve


def steps_to(loss: float, curve: Curve) -> float:
    """Return the steps at which the curve first is at the loss, between two points; else inf."""
    for (before, above), (after, below) in pairwise(curve):
        if below <= loss:
            return before + (after - before) * (above - loss) / max(above - below, 1e-12)
    return float("inf")


def make_trainer_of(name: str, block_size: int) -> Callable[..., Trainer]:
    """Return a trainer with the settings of the paper, scaled down."""
    steps = STEPS_OF_50 * block_size // 50
    if name == "GTC":
        return partial(Gtc, gradient_threshold=THRESHOLDS[name])
    if name == "BMUF":
        return partial(Bmuf, block_size=steps)
    threshold = THRESHOLDS[name]
    return partial(Htm, block_size=steps, group_size=GROUP_SIZE, gradient_threshold=threshold)


def curve_of(
    task: Task,
    start: nn.Module,
    name: str,
    num_ranks: int,
    block_size: int,
    rate: float,
    target: float,
) -> Curve:
    """Train on simulated ranks until the target, at most on all frames."""
    num_summed = {"GTC": num_ranks, "BMUF": 1, "HTM": GROUP_SIZE}[name]
    arguments = (
        *(task, start, make_trainer_of(name, block_size), min(rate / num_summed, ONE_RANK_RATE)),
        *(len(task.training[1]) // (num_ranks * MINIBATCH_FRAMES), 256 // num_ranks, target),
    )
    return simulate_ranks(num_ranks, train, *arguments)[0]


def step_seconds(model: CostModel, name: str, num_ranks: int, block_size: int) -> float:
    """Return the seconds of a step by the cost model."""
    if name == "GTC":
        return model.gtc(num_ranks)
    if name == "BMUF":
        return model.bmuf(num_ranks, block_size)
    return model.htm(num_ranks, GROUP_SIZE, block_size)


def one_rank(task: Task) -> tuple[nn.Module, Curve]:
    """Return the model that all trainings start from, and one rank's curve from there."""
    torch.manual_seed(task.seed)
    start = network(NUM_UNITS)
    optimizer = SGD(start.parameters(), lr=ONE_RANK_RATE)
    num_steps = len(task.training[1]) // MINIBATCH_FRAMES
    for step in range(num_steps // PRETRAINED_PART):
        inputs, labels = task.minibatch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(start(inputs), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    arguments = (task, start, Synchronous, ONE_RANK_RATE, num_steps // 2, 256)
    return start, simulate_ranks(1, train, *arguments)[0]


def spread(gains: Sequence[float]) -> str:
    """Write the median and the range; a training that never reached the target gained nothing."""
    ordered = statistics.median(gains), min(gains), max(gains)
    median, least, most = (f"{each:.1f}" if each else "never" for each in ordered)
    return f"{median} ({least}..{most})"


def as_text(model: CostModel, gains: Mapping[tuple[str, int, int], Sequence[float]]) -> str:
    """Lay the speed-ups out beside the published ones, as Markdown."""
    columns = (
        "trainer",
        "ranks",
        "block",
        "frames/s: paper",
        "model",
        "convergence: paper",
        "ours",
    )
    lines = [f"| {' | '.join(columns)} |", "| --- " * len(columns) + "|"]
    for (name, num_ranks, block_size), found in gains.items():
        throughput, convergence = PAPER[name, num_ranks, block_size]
        seconds = step_seconds(model, name, num_ranks, block_size)
        cells = (
            name,
            num_ranks,
            block_size if name != "GTC" else "",
            throughput,
            f"{model.speed_up(num_ranks, seconds):.1f}",
            convergence,
            spread(found),
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    """Tune the rates, train, and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=160_000, help="one rank trains on half")
    num_frames = parser.parse_args().frames
    torch.set_num_threads(1)
    # The paper's model and minibatch; `megahour scaling` assumes this density.
    workload = ScalingWorkload(num_parameters=24_000_000, minibatch_frames=2048, density=1e-3)
    model = CostModel(workload, read_scaling("scaling_v100"))
    tuning = Task.of(TUNING_SEED, num_frames)
    start, curve = one_rank(tuning)
    rates = {}
    for name, tried in RATES.items():
        found = {
            rate: steps_to(
                curve[-1][1],
                curve_of(tuning, start, name, TUNING_RANKS, 50, rate, curve[-1][1]),
            )
            for rate in tried
        }
        rates[name] = min(found, key=lambda rate: found[rate])
        print(f"{name} at {TUNING_RANKS} ranks, steps to the target by rate: {found}", flush=True)
    gains: dict[tuple[str, int, int], list[float]] = {key: [] for key in PAPER}
    for seed in SEEDS:
        task = Task.of(seed, num_frames)
        start, curve = one_rank(task)
        target, steps = curve[-1][1], curve[-1][0]
        print(f"seed {seed}: {curve[0][1]:.3f} to {target:.3f} in {steps} steps", flush=True)
        for (name, num_ranks, block_size), found in gains.items():
            curve = curve_of(task, start, name, num_ranks, block_size, rates[name], target)
            seconds = steps_to(target, curve) * step_seconds(model, name, num_ranks, block_size)
            found.append(steps * model.computing_seconds / seconds)
        print(as_text(model, gains), flush=True)


if __name__ == "__main__":
    main()
