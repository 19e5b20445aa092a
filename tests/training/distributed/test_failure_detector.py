"""Kill, stop or fail one rank of a real world: the others end soon, and name it."""

import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import pytest

from tests.training.distributed.rank_processes import (
    NUM_RANKS,
    End,
    Misbehave,
    Scenario,
    Train,
    World,
)

TRAINERS = ("synchronous", "gtc", "bmuf", "htm")
MIXING = ("rand_psgd", "ad_psgd")
OTHERS = ("one_bit", "d_psgd", "d1d_psgd", "sparse_loco")
STALL_LIMIT_S = 4.0
PATIENCE_S = 60.0  # what a busy machine may take
SILENT = " did not answer: killed, stopped or stuck"


@dataclass(frozen=True)
class Case:
    """Case is a fault of one rank in a world, and the message that the others must end with."""

    scenario: Scenario
    victim: int
    message: str
    sent_signal: signal.Signals | None = None
    time_limit_s: float = PATIENCE_S
    holds_store: bool = True


def stopped(trainer: str, victim: int) -> Case:
    return Case(Train(trainer), victim, SILENT, signal.SIGSTOP, STALL_LIMIT_S)


CASES = {  # the long ones begin first
    **{f"stop {trainer}": stopped(trainer, rank) for rank, trainer in enumerate(TRAINERS)},
    **{f"stop {trainer}": stopped(trainer, rank) for rank, trainer in enumerate(MIXING, start=1)},
    **{f"stop {trainer}": stopped(trainer, rank) for rank, trainer in enumerate(OTHERS)},
    "sleep": Case(Misbehave(2, "sleep"), 2, " came to no exchange for ", None, STALL_LIMIT_S),
    "raise": Case(Misbehave(1, "raise"), 1, " ended: ValueError: this rank's data are corrupt"),
    "leave": Case(Misbehave(3, "leave"), 3, " had ended: took fewer steps than the others"),
    "kill rank 0, which holds the store": Case(
        Train("gtc"), 0, ", which held it, has ended", signal.SIGKILL, holds_store=False
    ),
    "kill rank 1, while rank 0 holds the store": Case(
        Train("gtc"), 1, SILENT, signal.SIGKILL, holds_store=False
    ),
    **{
        f"kill {trainer} {rank}": Case(Train(trainer), rank, SILENT, signal.SIGKILL)
        for trainer in TRAINERS
        for rank in range(NUM_RANKS)
    },
    **{
        f"kill {trainer} {rank}": Case(Train(trainer), rank, SILENT, signal.SIGKILL)
        for trainer in MIXING
        for rank in (1, 2)
    },
    **{f"kill {name} 1": Case(Train(name), 1, SILENT, signal.SIGKILL) for name in OTHERS},
}


def open_worlds(
    cases: Mapping[str, Case], pause_s: Callable[[], float], *, on_devices: bool = False
) -> Iterator[dict[str, World]]:
    """Start a world for each case, all at once; its signal comes a pause after training begins."""
    started = {}
    try:
        for name, case in cases.items():
            limits = case.time_limit_s, case.holds_store
            started[name] = world = World(case.scenario, *limits, on_devices)
            world.wait_for_training()
            if case.sent_signal is not None:
                time.sleep(pause_s())
                world.send_signal(case.victim, case.sent_signal)
        yield started
    finally:
        for world in started.values():
            world.close()


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[str, World]]:
    """The fault comes at a random moment of training."""
    moments = random.Random(0)
    yield from open_worlds(CASES, lambda: moments.uniform(0, 0.05))


@pytest.mark.parametrize("name", CASES)
def test_every_other_rank_ends_and_names_the_faulty_one(
    worlds: dict[str, World], name: str
) -> None:
    """A rank is killed, stopped, asleep, in error or gone: each other one ends and says why."""
    case, world = CASES[name], worlds[name]
    ends = world.ends([rank for rank in range(NUM_RANKS) if rank != case.victim], PATIENCE_S)
    for end in ends:
        require_named(end, world, case)
    print(name, [round(end.at_s - world.signalled_at_s, 2) for end in ends])


def require_named(end: End, world: World, case: Case) -> None:
    """Assert that the message of this end names the victim's host and process, and the fault."""
    name = f"process {world.processes[case.victim].pid}){case.message}"
    assert end.exit_code == 1, end
    assert f"rank {case.victim} (host " in end.message, end
    assert name in end.message, end
