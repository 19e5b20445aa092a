"""Train by decentralized SGD on real ranks: frame accuracy, and paper 001's Table 1 on the wire.

torchrun --standalone --nproc-per-node 8 -m -- tests.benchmarks.trainer_tables.real_ranks --run RUN

RUN and the task are those of tests.benchmarks.trainer_tables. Bytes are counted where exchanges
start, per rank and step, in sizes of the model: Table 1 has 2 |M| for each trainer. Ranks share
this machine's cores, so that seconds are for comparison within one run alone.
"""

import argparse
import time
from dataclasses import dataclass
from functools import partial
from itertools import islice

import torch

from tests.benchmarks.trainer_tables.__main__ import make_optimizer
from tests.benchmarks.trainer_tables.chunks import ChunkTask, Minibatch, read_chunks
from tests.benchmarks.trainer_tables.rows import MANY_CHUNKS, MIXING, MOMENTUM
from training.distributed import collectives, process_group
from training.distributed.process_group import ProcessGroup
from training.simulation import MakeTrainer, Training
from training.trainers import Synchronous

NUM_EPOCHS, SEED = 4, 1
RATE, DELAYED_RATE = 0.8, 0.2
"""The best of trainer_tables on 16 ranks; D1D-PSGD's gradients are a step old."""

TRAINERS: dict[str, MakeTrainer] = {"synchronous SGD": Synchronous, **MIXING}


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding is a training's held-out percent, models sent per rank and step, and its seconds."""

    accuracy: float
    models_sent: float
    seconds: float


def main() -> None:
    """Train by each trainer in turn, then print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", required=True, help="a finished run with soft targets")
    parser.add_argument("--steps", type=int, help="of an epoch; default: all")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = read_chunks(arguments.run)
    with process_group.open_world() as group:
        findings = {name: train(task, group, name, arguments) for name in TRAINERS}
        if group.rank() == 0:
            print(table(findings, group.size()))


def train(
    task: ChunkTask, group: ProcessGroup, name: str, arguments: argparse.Namespace
) -> Finding:
    """Train the network of one hidden layer, as the simulation does."""
    start = task.new_model("sigmoid", SEED)
    scale = group.size() if name in MIXING else 1
    rate = scale * (DELAYED_RATE if name == "D1D-PSGD" else RATE)
    training: Training[Minibatch] = task.training_from(
        start,
        partial(make_optimizer, MOMENTUM),
        SEED,
        (*(rate,) * (NUM_EPOCHS - 1), rate / 4),
        MANY_CHUNKS,
        MANY_CHUNKS,
        lambda *_: 0.0,
    )
    model = training.make_model()
    optimizer = training.make_optimizer(model)
    trainer = TRAINERS[name](model, optimizer, group=group)
    num_bytes = sum(p.nbytes for p in model.parameters())
    began = time.perf_counter()
    with trainer:
        for epoch in range(NUM_EPOCHS):
            for settings in optimizer.param_groups:
                settings["lr"] = training.learning_rates[epoch]
            minibatches = training.minibatches(epoch, group.rank(), group.size())
            for minibatch in islice(minibatches, arguments.steps):
                optimizer.zero_grad()
                training.loss(model, minibatch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        sent = torch.tensor([trainer.wire_bytes / num_bytes / trainer.num_steps])
    seconds = time.perf_counter() - began
    collectives.all_reduce_mean(sent, group)
    return Finding(training.evaluate(model), float(sent), seconds)


def table(findings: dict[str, Finding], num_ranks: int) -> str:
    """Lay out one number of ranks as Markdown."""
    lines = [
        f"{num_ranks} ranks, seed {SEED}",
        "",
        "| | held-out | models sent a step (Table 1: 2) | seconds |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {each.accuracy:.1f} | {each.models_sent:.2f} | {each.seconds:.0f} |"
        for name, each in findings.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
