"""Run one rank of a race, started on its host by race.py, until the target loss.

The clock stops on all ranks while rank 0 evaluates.
"""

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from tests.benchmarks.slow_link.contestants import CONTESTANTS
from tests.benchmarks.slow_link.hosts import CARD
from tests.benchmarks.slow_link.method import EXCHANGE_LIMIT_S, Entered, Ranks, Settings
from tests.benchmarks.slow_link.task import Frames, new_model, validation_loss

MOMENTUM = 0.9
FIRST_STEPS, FIRST_FRAMES, FIRST_RATE = 120, 128, 0.1
DIVERGED_LOSS = 20.0
FIRST_RANK = 998  # no other rank has its minibatches


@dataclass(frozen=True)
class Heat:
    """Heat is one training to `target_loss`, seen each `evaluate_every` steps, or `max_steps`."""

    method: str
    settings: Settings
    seed: int
    target_loss: float
    num_frames: int
    evaluate_every: int
    max_steps: int


@dataclass(frozen=True)
class Point:
    """Point holds a training's progress; bytes are those of all hosts, to others and within."""

    step: int
    duration_s: float
    between_bytes: int
    within_bytes: int
    loss: float


@dataclass(frozen=True)
class Place:
    """Place says which rank this is, and where rank 0's store listens."""

    rank: int
    num_ranks: int
    ranks_per_host: int
    address: str
    first_address: str
    port: int


class StopWatch:
    """StopWatch counts seconds and bytes of all ranks together, while it is not paused."""

    def __init__(self, place: Place, group: dist.ProcessGroup) -> None:
        self._is_counting = place.rank % place.ranks_per_host == 0
        self._group = group
        self.duration_s = 0.0
        self.sent_bytes = torch.zeros(2, dtype=torch.int64)
        self.start()

    def start(self) -> None:
        """Resume when all ranks are here."""
        self._first_bytes = self._all_sent()
        self._started = time.perf_counter()

    def pause(self) -> None:
        """Stop when all ranks are here."""
        self.sent_bytes += self._all_sent() - self._first_bytes
        self.duration_s += time.perf_counter() - self._started

    def _all_sent(self) -> torch.Tensor:
        sent = torch.tensor(sent_bytes() if self._is_counting else (0, 0))
        dist.all_reduce(sent, group=self._group)
        return sent


def sent_bytes() -> tuple[int, int]:
    """Return the bytes that this host has sent by its card, and to itself."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    sent = {name.strip(): int(fields.split()[8]) for name, fields in (s.split(":") for s in lines)}
    return sent[CARD], sent["lo"]


def run_heat(heat: Heat, place: Place, group: dist.ProcessGroup) -> list[Point]:
    """Train once; return rank 0's points."""
    frames = Frames(heat.seed)
    model = pretrained_model(frames, heat.seed)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=heat.settings.learning_rate, momentum=MOMENTUM
    )
    ranks = Ranks(group, place.ranks_per_host, place.address, place.first_address)
    with CONTESTANTS[heat.method].enter(model, optimizer, ranks, heat.settings) as entered:
        return list(points(heat, place, group, frames, entered))


def pretrained_model(frames: Frames, seed: int) -> nn.Module:
    """Train a model on one rank first, as the paper's experiments do (000 3.2)."""
    model = new_model(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=FIRST_RATE, momentum=MOMENTUM)
    for step in range(FIRST_STEPS):
        inputs, classes = frames.minibatch(step, FIRST_RANK, FIRST_FRAMES)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), classes).backward()
        optimizer.step()
    return model


def points(
    heat: Heat, place: Place, group: dist.ProcessGroup, frames: Frames, entered: Entered
) -> Iterator[Point]:
    """Train; yield a point at each evaluation."""
    validation = frames.validation()
    evaluated_model = new_model(heat.seed)
    watch = StopWatch(place, group)
    for step in range(1, heat.max_steps + 1):
        take_step(heat, place, frames, entered, step)
        if step % heat.evaluate_every != 0:
            continue
        watch.pause()
        loss = torch.zeros(1)
        if place.rank == 0:
            loss += validation_loss(evaluated_model, entered.weights(), validation)
        dist.broadcast(loss, 0, group=group)
        yield Point(step, watch.duration_s, *watch.sent_bytes.tolist(), float(loss))
        if not heat.target_loss < float(loss) < DIVERGED_LOSS:
            return
        watch.start()


def take_step(heat: Heat, place: Place, frames: Frames, entered: Entered, step: int) -> None:
    """Take one step of an ordinary loop; scale losses so that rates mean the same everywhere."""
    inputs, classes = frames.minibatch(step, place.rank, heat.num_frames)
    entered.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(entered.module(inputs), classes)
    (loss / place.num_ranks if entered.sums else loss).backward()
    entered.optimizer.step()


def run_heats(place: Place, heats: Sequence[Heat]) -> list[list[Point]]:
    """Meet the other ranks and train each heat in turn."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{place.first_address}:{place.port}",
        rank=place.rank,
        world_size=place.num_ranks,
        timeout=timedelta(seconds=EXCHANGE_LIMIT_S),
    )
    assert dist.group.WORLD is not None
    results = [run_heat(heat, place, dist.group.WORLD) for heat in heats]
    dist.destroy_process_group()
    return results


def main() -> None:
    """Read place and heats from standard input; rank 0 prints the points of each heat."""
    torch.set_num_threads(1)
    given = json.load(sys.stdin)
    place = Place(**given["place"])
    heats = [Heat(**{**heat, "settings": Settings(**heat["settings"])}) for heat in given["heats"]]
    results = run_heats(place, heats)
    if place.rank == 0:
        print(json.dumps([[asdict(point) for point in heat] for heat in results]))


if __name__ == "__main__":
    main()
