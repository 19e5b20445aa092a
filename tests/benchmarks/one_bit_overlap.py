"""Show how much of 1-bit SGD's exchange double buffering hides behind backward passes (004 2.2).

`torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.one_bit_overlap [--units N]
[--layers N] [--frames N] [--steps N]`

Real gloo ranks train on this host, with one thread each. Of each exchange the moments of its
begin and end are noted, and of each step the moments of forward and backward passes: hidden is the
share of the exchange's seconds during which the rank computed. `--trace FILE` writes rank 0's
steps as torch.profiler sees them, for chrome://tracing.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from training.distributed import process_group
from training.distributed.process_group import ProcessGroup
from training.trainers import OneBit
from training.trainers.one_bit.message_exchange import MessageExchange

Spans = list[tuple[float, float]]


@contextmanager
def span(spans: Spans) -> Iterator[None]:
    """Note when the body begins and ends."""
    begin = time.perf_counter()
    yield
    spans.append((begin, time.perf_counter()))


def overlap_s(exchanges: Spans, computations: Spans) -> float:
    """Return the seconds of exchanges that lie within computations."""
    return sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in exchanges
        for other_begin, other_end in computations
    )


def timed(spans: Spans, update: Callable[..., Any]) -> Callable[..., Any]:
    """Return `MessageExchange.update` with its moments noted, and a name in a profile."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        with span(spans), torch.profiler.record_function("1-bit exchange"):
            return update(*args, **kwargs)

    return watched


def train(group: ProcessGroup, options: argparse.Namespace, double_buffering: bool) -> str:
    """Train, and return a row of this rank's figures."""
    torch.manual_seed(0)
    layers = [nn.Linear(options.units, options.units) for _ in range(options.layers)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    exchanges: Spans = []
    computations: Spans = []
    steps: Spans = []
    update = timed(exchanges, MessageExchange.update)
    with (
        patch.object(MessageExchange, "update", update),
        OneBit(model, optimizer, group=group, double_buffering=double_buffering),
    ):
        for inputs in torch.randn(options.steps, options.frames, options.units):
            with span(steps):
                with span(computations), torch.profiler.record_function("forward, backward"):
                    optimizer.zero_grad()
                    (model(inputs).square().sum() / options.frames).backward()
                optimizer.step()
    return report(double_buffering, exchanges, computations, steps)


def report(double_buffering: bool, exchanges: Spans, computations: Spans, steps: Spans) -> str:
    """Lay out the medians of rank 0 in milliseconds, and the share that was hidden."""

    def median(spans: Spans) -> str:
        return f"{1e3 * statistics.median(end - begin for begin, end in spans):.1f}"

    total = sum(end - begin for begin, end in exchanges)
    hidden = overlap_s(exchanges, computations) / total
    name = "double buffering" if double_buffering else "one after the other"
    cells = [name, median(computations), median(exchanges), median(steps), f"{100 * hidden:.0f} %"]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print one row for each way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--frames", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trace", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with process_group.open_world() as group:
        rows = [train(group, options, double_buffering=False)]
        profile = torch.profiler.profile() if options.trace and group.rank() == 0 else None
        with profile or nullcontext():
            rows.append(train(group, options, double_buffering=True))
    if profile is not None:
        profile.export_chrome_trace(options.trace)
    if group.rank() == 0:
        print("| | forward, backward ms | exchange ms | step ms | exchange hidden |")
        print("\n".join(["| --- | --- | --- | --- | --- |", *rows]))


if __name__ == "__main__":
    main()
