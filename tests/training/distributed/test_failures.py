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
from training.distributed.failures import Member, Members, RankStatus, diagnose

STOPPED = ("synchronous", "htm", "ad_psgd", "one_bit")
KILLED = ("gtc", "bmuf", "htm", "sparse_loco", "one_bit", "d_psgd", "d1d_psgd", "rand_psgd")
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
    **{f"stop {trainer}": stopped(trainer, rank) for rank, trainer in enumerate(STOPPED)},
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
        f"kill {trainer}": Case(Train(trainer), number % NUM_RANKS, SILENT, signal.SIGKILL)
        for number, trainer in enumerate(KILLED)
    },
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
    require_named_by_all(name, CASES[name], worlds[name])


def require_named_by_all(name: str, case: Case, world: World) -> None:
    """Assert that each other rank ends with a message about the victim; print after how long."""
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


MEMBERS = Members("prefix", tuple(Member(f"host-{rank}", 100 + rank, "") for rank in range(4)))
SUM, ALONE = RankStatus("sum", 300.0), RankStatus("", 2.0)
WAITED_S = 300.0


@pytest.mark.parametrize(
    ("statuses", "fault"),
    [
        ({0: SUM, 2: ALONE, 3: SUM}, "rank 1 (host host-1, process 101) did not answer"),
        ({0: SUM}, "rank 3 (host host-3, process 103) did not answer: killed, stopped or stuck"),
        (
            {0: SUM, 1: RankStatus("", 299.0), 2: ALONE, 3: SUM},
            "rank 1 (host host-1, process 101) cam",
        ),
        (
            {0: SUM, 1: RankStatus("", 0.0, True), 2: SUM},
            "rank 3 (host host-3, process 103) did not",
        ),
        (
            {0: SUM, 1: RankStatus("", 0.0, True), 2: ALONE, 3: SUM},
            "process 101) had ended: took few",
        ),
    ],
)
def test_names_the_ranks_at_fault(statuses: dict[int, RankStatus], fault: str) -> None:
    """Silent ranks come before ranks that left, and those before late ones; busy is not late."""
    found = diagnose(MEMBERS, statuses, WAITED_S)
    assert fault in found
    assert "rank 2" not in found or 2 not in statuses


def test_gives_every_ranks_exchange_if_none_is_at_fault() -> None:
    """Ranks in different exchanges, or an exchange that failed at once: no rank is at fault."""
    statuses = {0: SUM, 1: RankStatus("broadcast", 299.6), 2: ALONE, 3: SUM}
    places = "rank 0 in sum for 300 s, rank 1 in broadcast for 300 s, rank 2 at work alone for 2 s"
    assert places in diagnose(MEMBERS, statuses, WAITED_S)
    at_once = {rank: RankStatus("", 9.0) for rank in range(1, 4)} | {0: RankStatus("sum", 0.001)}
    assert diagnose(MEMBERS, at_once, 0.001).startswith("all ranks answered: rank 0 in sum for 0")


def test_names_all_ranks_that_are_at_fault() -> None:
    """Two that did not answer, each with its host and process."""
    both = "rank 1 (host host-1, process 101), rank 3 (host host-3, process 103) did not answer"
    assert diagnose(MEMBERS, {0: SUM, 2: ALONE}, WAITED_S).startswith(both)


@pytest.mark.parametrize(
    ("waited_s", "alone_s", "is_late"),
    [
        (300.0, 269.9, False),
        (300.0, 270.1, True),
        (10.0, 8.9, False),
        (10.0, 9.0, True),
        (10.0, 9.1, True),
        (1.0, 1.0, True),
        (0.99, 300.0, False),
    ],
)
def test_a_rank_is_late_after_nine_tenths_of_the_wait(
    waited_s: float, alone_s: float, is_late: bool
) -> None:
    """A rank is late if it worked alone for 0.9 of the others' wait, which is at least a second."""
    exchange = RankStatus("sum", waited_s)
    found = diagnose(
        MEMBERS, {0: exchange, 1: RankStatus("", alone_s), 2: exchange, 3: exchange}, waited_s
    )
    late = f"rank 1 (host host-1, process 101) came to no exchange for {waited_s:.0f} s: stuck in"
    assert found.startswith(late if is_late else "all ranks answered: rank 0 in sum for")
