"""Show how much of 1-bit SGD's exchange double buffering hides behind backward passes (004 2.2).

`torchrun --standalone --nproc-per-node 2 -m tests.benchmarks.one_bit_overlap [--units N]
[--layers N] [--frames N] [--steps N] [--trace FILE]`

Real gloo ranks train on this host, with one thread each. Of each exchange the moments of its
begin and end are noted, and of each step the moments of forward and backward passes: hidden is the
share of the exchange's seconds during which the rank computed. `--trace FILE` traces rank 0 for a
few more steps with torch.profiler, all threads of it, and takes the same share from the trace.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig

from training.distributed import process_group
from training.distributed.process_group import ProcessGroup
from training.trainers import OneBit
from training.trainers.one_bit import MessageExchange

EXCHANGE, PASSES = "1-bit exchange", "forward, backward"
"""The names of both in a trace."""
TRACED_STEPS = 5
ENOUGH = 0.5
"""The share of what can be hidden, from which on the verdict says that it is."""

Spans = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Timeline holds when exchanges, passes and whole steps began and ended, in seconds."""

    exchanges: Spans = field(default_factory=list)
    passes: Spans = field(default_factory=list)
    steps: Spans = field(default_factory=list)

    @property
    def overlap_s(self) -> float:
        """Return the seconds of exchanges during which the rank computed."""
        return sum(
            max(0.0, min(end, other_end) - max(begin, other_begin))
            for begin, end in self.exchanges
            for other_begin, other_end in self.passes
        )

    @property
    def hidden_share(self) -> float:
        """Return the share of the exchanges' seconds during which the rank computed."""
        return self.overlap_s / total_s(self.exchanges)

    @property
    def used_share(self) -> float:
        """Return the same of what can be hidden: of the shorter of exchanges and passes."""
        return self.overlap_s / min(total_s(self.exchanges), total_s(self.passes))

    @property
    def step_ms(self) -> float:
        """Return a step's milliseconds."""
        return median_ms(self.steps)


def total_s(spans: Spans) -> float:
    """Return the sum in seconds."""
    return sum(end - begin for begin, end in spans)


def median_ms(spans: Spans) -> float:
    """Return the median in milliseconds."""
    return 1e3 * statistics.median(end - begin for begin, end in spans)


@contextmanager
def span(spans: Spans, name: str) -> Iterator[None]:
    """Note when the body begins and ends, and name it in a profile."""
    begin = time.perf_counter()
    with torch.profiler.record_function(name):
        yield
    spans.append((begin, time.perf_counter()))


def timed(spans: Spans, update: Callable[..., Any]) -> Callable[..., Any]:
    """Return `MessageExchange.update` with its moments noted."""

    def watched(*args: Any, **kwargs: Any) -> Any:
        with span(spans, EXCHANGE):
            return update(*args, **kwargs)

    return watched


def train(
    group: ProcessGroup, options: argparse.Namespace, num_steps: int, *, double_buffering: bool
) -> Timeline:
    """Train, and return this rank's timeline."""
    torch.manual_seed(0)
    layers = [nn.Linear(options.units, options.units) for _ in range(options.layers)]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    found = Timeline()
    with (
        patch.object(MessageExchange, "update", timed(found.exchanges, MessageExchange.update)),
        OneBit(model, optimizer, group=group, double_buffering=double_buffering),
    ):
        for inputs in torch.randn(num_steps, options.frames, options.units):
            with span(found.steps, "step"):
                with span(found.passes, PASSES):
                    optimizer.zero_grad()
                    (model(inputs).square().sum() / options.frames).backward()
                optimizer.step()
    return found


def train_traced(group: ProcessGroup, options: argparse.Namespace, file: Path) -> None:
    """Train a few steps with double buffering; rank 0 writes a trace of all its threads."""
    if group.rank():
        train(group, options, TRACED_STEPS, double_buffering=True)
        return
    # By default the profiler watches its own thread alone, in which no exchange runs.
    every_thread = _ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=every_thread) as profile:
        train(group, options, TRACED_STEPS, double_buffering=True)
    profile.export_chrome_trace(str(file))


def read_trace(file: Path) -> tuple[Timeline, bool]:
    """Read the timeline of a trace, and whether its exchanges ran in threads of their own."""
    events = json.loads(file.read_text())["traceEvents"]
    named = [each for each in events if each["name"] in (EXCHANGE, PASSES) and each["ph"] == "X"]
    found, threads = Timeline(), {EXCHANGE: set[int](), PASSES: set[int]()}
    for each in named:
        begin, end = each["ts"] / 1e6, (each["ts"] + each["dur"]) / 1e6
        threads[each["name"]].add(each["tid"])
        (found.exchanges if each["name"] == EXCHANGE else found.passes).append((begin, end))
    return found, threads[EXCHANGE].isdisjoint(threads[PASSES])


def table(rows: dict[str, Timeline]) -> str:
    """Lay out the medians of a rank in milliseconds, and the share that was hidden."""
    lines = [
        f"| {name} | {median_ms(row.passes):.1f} | {median_ms(row.exchanges):.1f} "
        f"| {row.step_ms:.1f} | {100 * row.hidden_share:.0f} % |"
        for name, row in rows.items()
    ]
    head = "| | forward, backward ms | exchange ms | step ms | exchange hidden |"
    return "\n".join([head, "| --- | --- | --- | --- | --- |", *lines])


def verdict(alternating: Timeline, beside: Timeline) -> str:
    """Say whether exchanges are hidden, and what that saves."""
    is_enough = beside.used_share >= ENOUGH
    said = "overlap computation" if is_enough else "hardly overlap computation"
    return (
        f"Verdict: exchanges {said}: {100 * beside.hidden_share:.0f} % of their time is hidden "
        f"behind forward and backward passes, {100 * beside.used_share:.0f} % of what these can "
        f"hide. A step takes {beside.step_ms:.0f} ms, and {alternating.step_ms:.0f} where one "
        "follows the other."
    )


def trace_verdict(file: Path) -> str:
    """Say the same of a trace, and how to look at it."""
    seen, is_apart = read_trace(file)
    where = "threads of their own" if is_apart else "the thread of the passes"
    return (
        f"Trace {file}: {len(seen.exchanges)} exchanges in {where}, "
        f"{100 * seen.hidden_share:.0f} % of their time within passes. Open it at "
        "https://ui.perfetto.dev or chrome://tracing."
    )


def main() -> None:
    """Print a row for each way, the verdict, and what the trace says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--units", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--frames", type=int, default=512)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--trace", type=Path, help="a file for a trace in Chrome's format")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with process_group.open_world() as group:
        alternating = train(group, options, options.steps, double_buffering=False)
        beside = train(group, options, options.steps, double_buffering=True)
        if options.trace:
            train_traced(group, options, options.trace)
    if group.rank() == 0:
        print(table({"one after the other": alternating, "double buffering": beside}))
        print(f"\n{verdict(alternating, beside)}")
        if options.trace:
            print(trace_verdict(options.trace))


if __name__ == "__main__":
    main()
