"""Reproduce in shape paper 004's Table 4: frames a second by minibatch size, and double buffering.

python -m tests.benchmarks.trainer_tables.throughput

Four simulated nodes train by the trainer itself in virtual time. What a node computes is the
paper's: 78.7 us a frame (Table 5, 1 x 2 at 16,384), and a fixed 9 ms (5.1). The link makes the two
stages of a 46 M-parameter model's messages take 6.5 ms, the middle of 3 to 10 (5.1).
"""

import argparse
from functools import partial

import torch
from torch import nn

from training.distributed.simulated_group import SimulatedGroup, SimulatedLink, simulate_ranks
from training.settings.trainers import AdaGrad, AdaGradPlace
from training.trainers import OneBit

NUM_NODES = 4
FRAME_S, FIXED_S, EXCHANGE_S = 78.7e-6, 9e-3, 6.5e-3
NUM_UNITS, NUM_STEPS = 64, 12
PUBLISHED = {
    1000: ("-", "15"), 2000: ("23", "23"), 2800: ("28", "28"), 4000: ("32", "34"),
    8000: ("36", "39"), 16_000: ("38", "45"), 32_000: ("39", "47"), 64_000: ("44", "49"),
    92_000: ("45", "50"),
}  # fmt: skip


def link() -> SimulatedLink:
    """Return a link on which both stages of the small model's messages take `EXCHANGE_S`."""
    num_bytes = NUM_UNITS * NUM_UNITS / 8
    # Each stage sends three quarters of the bits to the other nodes, or a quarter three times.
    return SimulatedLink(bytes_per_s=2 * 0.75 * num_bytes / EXCHANGE_S)


def steps(group: SimulatedGroup, num_frames: int, double_buffering: bool) -> float:
    """Return the virtual seconds of `NUM_STEPS` minibatches on one node."""
    model = nn.Linear(NUM_UNITS, NUM_UNITS, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer = OneBit(
        model,
        optimizer,
        group=group,
        momentum=0.9,
        adagrad=AdaGrad(place=AdaGradPlace.NOWHERE),
        double_buffering=double_buffering,
    )
    parts = 2 if double_buffering else 1
    with trainer:
        start = group.now()
        for _ in range(parts * NUM_STEPS):
            optimizer.zero_grad()
            model(torch.ones(1, NUM_UNITS)).sum().backward()  # type: ignore[no-untyped-call]
            group.advance(num_frames / parts / NUM_NODES * FRAME_S + FIXED_S)
            optimizer.step()
        return group.now() - start


def main() -> None:
    """Print thousands of frames a second beside the paper's."""
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    print(
        "| N | one exchange a minibatch | double buffering | published |\n| --- | --- | --- | --- |"
    )
    for num_frames, published in PUBLISHED.items():
        rates = [
            NUM_STEPS * num_frames / max(simulate_ranks(NUM_NODES, run, link=link())) / 1000
            for run in (
                partial(steps, num_frames=num_frames, double_buffering=double_buffering)
                for double_buffering in (False, True)
            )
        ]
        cells = [f"{num_frames:,}", *(f"{rate:.0f}" for rate in rates), ", ".join(published)]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
