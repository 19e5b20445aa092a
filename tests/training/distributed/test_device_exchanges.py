"""A rank fails while devices wait for it and no host does: each other process ends and names it."""

import signal
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.training.distributed.rank_processes import Train, WaitForDevice, World
from tests.training.distributed.test_failures import (
    PATIENCE_S,
    SILENT,
    Case,
    open_worlds,
    require_named_by_all,
)
from training.distributed.failures import FailureDetector, rendezvous

CASES = {
    # HTM's groups of two have both backends, too.
    "stop": Case(Train("htm"), 2, SILENT, signal.SIGSTOP),
    "kill": Case(WaitForDevice(1, "sleep"), 1, SILENT, signal.SIGKILL),
    "sleep": Case(WaitForDevice(0, "sleep"), 0, " came to no exchange for ", None, 20.0),
    "raise": Case(WaitForDevice(3, "raise"), 3, " ended: ValueError: this rank's data are corrupt"),
    "leave": Case(WaitForDevice(2, "leave"), 2, " had ended: took fewer steps than the others"),
}


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[str, World]]:
    """A signal comes after a rank's first beat, by which it is known to live."""
    yield from open_worlds(CASES, lambda: 1.5, on_devices=True)


@pytest.mark.parametrize("name", CASES)
def test_a_device_that_waits_ends_its_process(worlds: dict[str, World], name: str) -> None:
    """The message names the rank that was killed, stopped, asleep, in error or gone."""
    require_named_by_all(name, CASES[name], worlds[name])


class Broken(dist.Work):
    """Broken is an exchange of a device that has failed: each call of CUDA raises from then on."""

    def is_completed(self) -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def detector(store: dist.Store) -> Iterator[FailureDetector]:
    """Watch the devices of a world of one rank."""
    members = rendezvous(store, 0, 1, PATIENCE_S)
    detector = FailureDetector(store, members, 0, PATIENCE_S, watches_devices=True)
    yield detector
    detector.close()


def test_a_broken_device_is_not_taken_for_a_lost_store(detector: FailureDetector) -> None:
    """Its exchanges are watched no more: the host raises the device's error itself."""
    for _ in range(2):
        detector.watch("sum", Broken())
    assert detector.diagnose().startswith("all ranks answered: rank 0 at work alone")


def test_a_diagnosis_ends_the_polling(store: dist.Store, detector: FailureDetector) -> None:
    """From then on the store hears from each rank once a second, not 20 times."""
    detector.diagnose()
    before, begun = num_beats(store, detector), time.monotonic()
    time.sleep(1.0)
    assert num_beats(store, detector) - before <= 1 + (time.monotonic() - begun)


def num_beats(store: dist.Store, detector: FailureDetector) -> int:
    return int(store.get(detector._key("beat/0")))
