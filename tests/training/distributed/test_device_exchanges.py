"""A rank fails while devices wait for it and no host does: each other process ends and names it."""

import signal
import time
from collections.abc import Iterator

import pytest

from tests.training.distributed.rank_processes import NUM_RANKS, Train, WaitForDevice, World
from tests.training.distributed.test_failure_detector import PATIENCE_S, SILENT, Case, require_named

CASES = {
    # HTM's groups of two have both backends, too.
    "stop": Case(Train("htm"), 2, SILENT, signal.SIGSTOP),
    "kill": Case(WaitForDevice(1, "sleep"), 1, SILENT, signal.SIGKILL),
    "sleep": Case(WaitForDevice(0, "sleep"), 0, " came to no exchange for ", None, 6.0),
    "raise": Case(WaitForDevice(3, "raise"), 3, " ended: ValueError: this rank's data are corrupt"),
    "leave": Case(WaitForDevice(2, "leave"), 2, " had ended: took fewer steps than the others"),
}


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[str, World]]:
    """Start a world for each case, all at once."""
    started = {}
    try:
        for name, case in CASES.items():
            started[name] = world = World(case.scenario, case.time_limit_s, on_devices=True)
            world.wait_for_training()
            if case.sent_signal is not None:
                time.sleep(1.5)  # a rank's first beat tells that it lives
                world.send_signal(case.victim, case.sent_signal)
        yield started
    finally:
        for world in started.values():
            world.close()


@pytest.mark.parametrize("name", CASES)
def test_a_device_that_waits_ends_its_process(worlds: dict[str, World], name: str) -> None:
    """The message names the rank that was killed, stopped, asleep, in error or gone."""
    case, world = CASES[name], worlds[name]
    ends = world.ends([rank for rank in range(NUM_RANKS) if rank != case.victim], PATIENCE_S)
    for end in ends:
        require_named(end, world, case)
    print(name, [round(end.at_s - world.signalled_at_s, 2) for end in ends])
