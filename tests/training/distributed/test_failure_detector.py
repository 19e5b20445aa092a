"""Ranks that die, stall, fail or leave, while real ones train: the others end soon, by name."""

import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.training.distributed.mortal_ranks import NUM_RANKS, BeOdd, End, Life, Train, World

TRAINERS = ("synchronous", "gtc", "bmuf", "htm")
STALL_LIMIT_S = 4.0
PATIENCE_S = 60.0  # what a busy machine may take
SILENT = " did not answer: killed, stopped or stuck"


@dataclass(frozen=True)
class Case:
    """What befalls which rank of a world, and what the others must say of it."""

    life: Life
    victim: int
    fault: str
    blow: signal.Signals | None = None
    time_limit_s: float = PATIENCE_S
    holds_store: bool = True


def stopped(trainer: str, victim: int) -> Case:
    return Case(Train(trainer), victim, SILENT, signal.SIGSTOP, STALL_LIMIT_S)


CASES = {  # those that take long begin first
    **{f"stop {trainer}": stopped(trainer, rank) for rank, trainer in enumerate(TRAINERS)},
    "sleep": Case(BeOdd(2, "sleep"), 2, " came to no exchange for ", None, STALL_LIMIT_S),
    "raise": Case(BeOdd(1, "raise"), 1, " ended: ValueError: this rank's data are rotten"),
    "leave": Case(BeOdd(3, "leave"), 3, " had ended: took fewer steps than the others"),
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
}


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[str, World]]:
    """One for each case, its blow struck at a random moment of training; none is waited for."""
    moments, started = random.Random(0), {}
    try:
        for name, case in CASES.items():
            started[name] = world = World(case.life, case.time_limit_s, case.holds_store)
            world.wait_for_training()
            time.sleep(moments.uniform(0, 0.05))
            if case.blow is not None:
                world.strike(case.victim, case.blow)
        yield started
    finally:
        for world in started.values():
            world.close()


@pytest.mark.parametrize("name", CASES)
def test_one_rank_ends_the_others_by_name(worlds: dict[str, World], name: str) -> None:
    """Killed, stopped, asleep, in error or gone early: each other rank ends, naming it and why."""
    case, world = CASES[name], worlds[name]
    ends = world.ends([rank for rank in range(NUM_RANKS) if rank != case.victim], PATIENCE_S)
    for end in ends:
        require_named(end, world, case)
    print(name, [round(end.at_s - world.struck_at_s, 2) for end in ends])


def require_named(end: End, world: World, case: Case) -> None:
    """The message of this end names the victim in full, and says what is the matter with it."""
    name = f"process {world.processes[case.victim].pid}){case.fault}"
    assert end.exit_code == 1, end
    assert f"rank {case.victim} (host " in end.message, end
    assert name in end.message, end
