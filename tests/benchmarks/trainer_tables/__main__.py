"""Reproduce in shape the accuracies of 1-bit SGD (paper 004) and decentralized SGD (paper 001).

python -m tests.benchmarks.trainer_tables --run RUN --out FILE [--tables 2,3,001] [--seeds 3]
    [--networks sigmoid,lstm] [--ranks 1,16]

RUN is a finished run with soft targets, such as runs/demo, or a fold of tests.benchmarks.rotation.
Simulated ranks learn the teacher's best senones of its training frames, in chunks of 20, by one
hidden layer or an LSTM. Accuracies are percent of the frames of held-out speakers and, in
brackets, of the training frames. Each row's rate is the best of three on seed 0. FILE keeps what is
finished, a line a training; a command that was cut off continues.
"""

import argparse
import json
import random
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm

from tests.benchmarks.trainer_tables.chunks import ChunkTask, Minibatch, Network, read_chunks
from tests.benchmarks.trainer_tables.rows import MIXING, STRAGGLING, TABLES, Row, Table
from tests.benchmarks.trainer_tables.selecting import train_selecting
from training.distributed.simulated_group import simulate_ranks
from training.simulation import Training, simulate

TUNING_SEED = 0
DIVERGED = 0.0


@dataclass(frozen=True, slots=True)
class Job:
    """Job is one training of a row."""

    table: str
    row: str
    network: Network
    rate: float
    seed: int


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Accuracy holds percent of held-out frames after each epoch, and of training frames."""

    heldout: tuple[float, ...]
    training: float


def main() -> None:
    """Train what is not finished, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="a finished run with soft targets")
    parser.add_argument("--out", required=True, type=Path, help="JSON lines of what is finished")
    parser.add_argument("--tables", default=",".join(TABLES), help="of 2, 3, 001, 001-plain")
    parser.add_argument("--networks", help="of sigmoid, lstm; default: the table's")
    parser.add_argument("--ranks", help="rows of so many ranks, such as 1,16; default: all")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = read_results(arguments.out)
    task = read_chunks(arguments.run)
    names = arguments.tables.split(",")
    only = arguments.networks.split(",") if arguments.networks else None
    networks = {
        name: [each for each in TABLES[name].networks if only is None or each in only]
        for name in names
    }
    ranks = {int(each) for each in arguments.ranks.split(",")} if arguments.ranks else None
    rows = {name: rows_of(name, ranks) for name in names}
    seeds = range(1, arguments.seeds + 1)
    for name in names:
        train_table(task, name, rows[name], networks[name], seeds, found, arguments.out)
    for name in names:
        for network in networks[name]:
            print(as_text(name, rows[name], network, seeds, found))


def rows_of(name: str, ranks: Collection[int] | None) -> tuple[Row, ...]:
    """Return a table's rows of these numbers of ranks; FILE must have the rows of their rates."""
    rows = TABLES[name].rows
    return tuple(row for row in rows if ranks is None or row.num_ranks in ranks)


def train_table(
    task: ChunkTask,
    name: str,
    rows: Sequence[Row],
    networks: Sequence[Network],
    seeds: Sequence[int],
    found: dict[Job, Accuracy],
    path: Path,
) -> None:
    """Tune each row's rate on seed 0, then train it with each seed."""
    tuning = [
        (row, Job(name, row.label, network, rate, TUNING_SEED))
        for network in networks
        for row in rows
        for rate in row.rates
    ]
    for row, job in tqdm(tuning, desc=f"{name}: rates"):
        train_once(task, TABLES[name], row, job, found, path)
    jobs = [
        (row, Job(name, row.label, network, best_rate(name, row, network, found), seed))
        for seed in seeds
        for network in networks
        for row in rows
    ]
    for row, job in tqdm(jobs, desc=f"{name}: seeds"):
        train_once(task, TABLES[name], row, job, found, path)


def train_once(
    task: ChunkTask, table: Table, row: Row, job: Job, found: dict[Job, Accuracy], path: Path
) -> None:
    """Train, unless it is finished; a training that diverges has accuracies of 0."""
    if job in found:
        return
    # A quarter in the last third, as rates decay in both papers.
    num_last = table.num_epochs // 3
    rates = [job.rate] * (table.num_epochs - num_last) + [job.rate / 4] * num_last
    start = task.new_model(job.network, job.seed)
    # A decentralized rank applies its own gradients, which count 1 / L of a frame's.
    scale = row.num_ranks if row.make_trainer in MIXING.values() else 1
    training = task.training_from(
        start,
        partial(make_optimizer, row.momentum),
        job.seed,
        tuple(scale * rate for rate in rates),
        row.chunks // 2 if row.is_half else row.chunks,
        table.chunks_of_rate,
        partial(straggling, job.seed),
    )
    try:
        model, evaluations = trained(training, row)
        accuracy = Accuracy(evaluations, task.accuracy(model, task.training))
    except FloatingPointError:
        accuracy = Accuracy((DIVERGED,) * table.num_epochs, DIVERGED)
    found[job] = accuracy
    with path.open("a") as file:
        file.write(json.dumps(asdict(job) | asdict(accuracy)) + "\n")


def trained(training: Training[Minibatch], row: Row) -> tuple[nn.Module, tuple[float, ...]]:
    """Train on the row's ranks; return the model, and its evaluations after each epoch."""
    if row.selection is None:
        outcome = simulate(training, row.num_ranks, row.make_trainer)
        return outcome.model, outcome.evaluations
    arguments = training, row.make_trainer, row.selection
    model, evaluations, _ = simulate_ranks(row.num_ranks, train_selecting, *arguments)[0]
    return model, evaluations


def make_optimizer(momentum: float, model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD; the simulation sets its rate."""
    return torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum)


def straggling(seed: int, rank: int, step: int) -> float:
    """Return the virtual seconds of a rank's step, of a distribution with stragglers."""
    return 1.0 + STRAGGLING * random.Random(f"{seed}/{rank}/{step}").random() ** 4


def read_results(path: Path) -> dict[Job, Accuracy]:
    """Read what is finished."""
    lines = path.read_text().splitlines() if path.exists() else []
    found = {}
    for record in map(json.loads, lines):
        heldout, training = tuple(record.pop("heldout")), record.pop("training")
        found[Job(**record)] = Accuracy(heldout, training)
    return found


def best_rate(name: str, row: Row, network: Network, found: Mapping[Job, Accuracy]) -> float:
    """Return the rate with the best final held-out accuracy on the tuning seed."""
    tuned = next(each for each in TABLES[name].rows if each.label == row.tuning_label)
    jobs = [Job(name, tuned.label, network, rate, TUNING_SEED) for rate in tuned.rates]
    return max(jobs, key=lambda job: found[job].heldout[-1]).rate


def as_text(
    name: str,
    rows: Sequence[Row],
    network: Network,
    seeds: Sequence[int],
    found: Mapping[Job, Accuracy],
) -> str:
    """Lay out one network's table as Markdown: medians, and ranges over the seeds."""
    table = TABLES[name]
    place = table.networks.index(network)
    lines = [
        f"{table.title}; {network}",
        "",
        "| | rate | held-out | medians by epoch | training | published |",
        "| --- | --- | --- | --- | --- | --- |",
        *cells(name, rows, network, place, seeds, found),
    ]
    return "\n".join(lines) + "\n"


def cells(
    name: str,
    rows: Sequence[Row],
    network: Network,
    place: int,
    seeds: Sequence[int],
    found: Mapping[Job, Accuracy],
) -> Iterator[str]:
    """Yield a line for each row."""
    for row in rows:
        rate = best_rate(name, row, network, found)
        accuracies = [found[Job(name, row.label, network, rate, seed)] for seed in seeds]
        heldout = spread([each.heldout[-1] for each in accuracies])
        training = spread([each.training for each in accuracies])
        # Paper 001's figures 1 and 2 are these curves: of one trainer, and of one number of ranks.
        epochs = zip(*(each.heldout for each in accuracies), strict=True)
        curve = ", ".join(f"{statistics.median(epoch):.1f}" for epoch in epochs)
        published = row.published[place] if place < len(row.published) else ""
        yield f"| {row.label} | {rate:g} | {heldout} | {curve} | {training} | {published} |"


def spread(values: Sequence[float]) -> str:
    """Write median and range."""
    return f"{statistics.median(values):.1f} ({min(values):.1f}..{max(values):.1f})"


if __name__ == "__main__":
    main()
