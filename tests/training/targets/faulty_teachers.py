"""A toy teacher's server with the faults that a test asks for, by the seeds of its utterances."""

import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.infra.devices.device_clients import kill
from training.targets.teacher import (
    Answers,
    TeacherBatch,
    TeacherFunction,
    decode_seed,
    serve_teacher,
)

WAIT_S = 0.5
"""Enough for all other requests of a shard to arrive."""


@dataclass(frozen=True)
class Faults:
    """Faults: the utterances, by their seeds, at which something happens."""

    delayed: Sequence[int] = ()
    raising: Sequence[int] = ()
    killing: Sequence[int] = ()

    def put(self, folder: Path) -> None:
        """Let the servers of `folder` have these faults from now on; forget their batches."""
        (folder / "batches").unlink(missing_ok=True)
        (folder / "faults.json").write_text(json.dumps(asdict(self)))


@dataclass(frozen=True)
class ComputedBatch:
    """ComputedBatch: the server's process, and the seeds of the utterances."""

    process: int
    seeds: Sequence[int]


def batches(folder: Path) -> list[ComputedBatch]:
    """Return the batches that servers began to compute, in order."""
    lines = (folder / "batches").read_text().splitlines()
    return [ComputedBatch(**json.loads(line)) for line in lines]


def kill_servers(folder: Path) -> None:
    """Kill all servers that `folder` ever had."""
    for process in (folder / "servers").read_text().split():
        kill(int(process))


class FaultyTeacher(TeacherFunction):
    """FaultyTeacher does a teacher's work, with the faults that its folder names."""

    def __init__(self, teacher: TeacherFunction, folder: Path) -> None:
        super().__init__(teacher._members, teacher._device, teacher._encode)
        self._folder = folder
        with (folder / "servers").open("a") as file:
            file.write(f"{os.getpid()}\n")

    def _faults(self) -> Faults:
        return Faults(**json.loads((self._folder / "faults.json").read_text()))

    def prepare(self, payloads: Sequence[bytes | memoryview]) -> TeacherBatch:
        """Delay some, so that what comes after them is batched together."""
        if {decode_seed(each) for each in payloads} & {*self._faults().delayed}:
            time.sleep(WAIT_S)
        return super().prepare(payloads)

    def compute(self, prepared: TeacherBatch) -> Answers:
        """Note the batch; die or raise at some utterances."""
        faults, seeds = self._faults(), set(prepared.seeds)
        with (self._folder / "batches").open("a") as file:
            file.write(json.dumps(asdict(ComputedBatch(os.getpid(), prepared.seeds))) + "\n")
        if seeds & {*faults.killing}:
            os.kill(os.getpid(), signal.SIGKILL)
        if seeds & {*faults.raising}:
            raise ValueError("utterance = poison: need another")
        return super().compute(prepared)


def serve_faulty_teacher(
    device: str, run_uri: str, k: str, form: str, folder: str
) -> FaultyTeacher:
    """Load the toy run's teacher."""
    return FaultyTeacher(serve_teacher(device, run_uri, k, form), Path(folder))
