"""Start real ranks in a world as torchrun opens it, and kill or stop them during training."""

import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from tests.training.rank_context import rank_context
from tests.training.trainers.ranks import TRAINERS
from training.distributed import collectives, failures, process_group
from training.trainers import AdPsgd, Trainer

NUM_RANKS = 4
START_LIMIT_S = 100.0
ANSWER_LIMIT_S = 3.0
SILENCE_LIMIT_S = 3.0
PAUSE_S = 0.005

Scenario = Callable[[ProcessGroup, Callable[[], None]], None]
"""A rank's work in the group; it calls its second argument once it trains."""


def make_trainer(name: str, model: nn.Module, group: ProcessGroup) -> Trainer:
    trainer_class, settings = {**TRAINERS, "ad_psgd": (AdPsgd, {"mixing_seed": 1})}[name]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return trainer_class(model, optimizer, group=group, **settings)


@dataclass(frozen=True)
class Train:
    """Train with this trainer until the process ends."""

    trainer: str

    def __call__(self, group: ProcessGroup, report_begin: Callable[[], None]) -> None:
        model = nn.Linear(5, 3)
        trainer = make_trainer(self.trainer, model, group)
        with trainer:
            for step in itertools.count():
                trainer.optimizer.zero_grad()
                model(torch.randn(6, 5)).square().sum().backward()
                trainer.optimizer.step()
                time.sleep(PAUSE_S)
                if step == 5:
                    report_begin()


@dataclass(frozen=True)
class Misbehave:
    """Run barriers without end; after the third, one rank raises an error, sleeps, or leaves."""

    rank: int
    fault: str

    def __call__(self, group: ProcessGroup, report_begin: Callable[[], None]) -> None:
        report_begin()
        for step in itertools.count():
            collectives.barrier(group)
            if (step, group.rank()) != (2, self.rank):
                continue
            if self.fault == "raise":
                raise ValueError("this rank's data are corrupt")
            if self.fault == "leave":
                return
            time.sleep(START_LIMIT_S)


class Endless(dist.Work):
    """Endless is an exchange that a device waits for, and its host does not, as NCCL's."""

    def is_completed(self) -> bool:
        return False

    def wait(self, *_: object) -> bool:
        return True


@dataclass(frozen=True)
class WaitForDevice:
    """Let the device wait for a rank, after three barriers; that one does something else."""

    rank: int
    fault: str

    def __call__(self, group: ProcessGroup, report_begin: Callable[[], None]) -> None:
        for _ in range(3):
            collectives.barrier(group)
        report_begin()
        if group.rank() != self.rank:
            process_group.wait_for(Endless(), torch.ones(1), "sum")
        elif self.fault == "raise":
            raise ValueError("this rank's data are corrupt")
        elif self.fault == "leave":
            return
        time.sleep(START_LIMIT_S)  # as the host does within CUDA, or in its own work


@dataclass(frozen=True)
class End:
    """End is a rank's exit code (None while it runs), its error message, and the time."""

    exit_code: int | None
    message: str
    at_s: float


@dataclass
class World:
    """World is four ranks; this process holds their store, as torchrun's agent does, or rank 0."""

    scenario: Scenario
    time_limit_s: float = START_LIMIT_S
    holds_store: bool = True
    on_devices: bool = False
    processes: list[ForkServerProcess] = field(default_factory=list)
    signalled_at_s: float = 0.0

    def __post_init__(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self._store.port
        if not self.holds_store:
            del self._store
        context = rank_context()
        pipes = [context.Pipe(duplex=False) for _ in range(NUM_RANKS)]
        self._connections = [ours for ours, _ in pipes]
        for rank, (_, theirs) in enumerate(pipes):
            target = _run_rank_on_device if self.on_devices else _run_rank
            arguments = (self.scenario, rank, port, self.holds_store, self.time_limit_s, theirs)
            process = context.Process(target=target, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)

    def wait_for_training(self) -> None:
        for rank, connection in enumerate(self._connections):
            assert connection.poll(START_LIMIT_S), f"rank {rank} has not begun to train"
            assert (message := connection.recv()) == "begun", message

    def send_signal(self, rank: int, number: signal.Signals) -> None:
        process_id = self.processes[rank].pid
        assert process_id is not None
        self.signalled_at_s = time.monotonic()
        os.kill(process_id, number)

    def ends(self, ranks: Sequence[int], within_s: float) -> list[End]:
        """Wait for these ranks; return how each one ended."""
        deadline = time.monotonic() + within_s
        found = []
        for rank in ranks:
            process, connection = self.processes[rank], self._connections[rank]
            process.join(max(0.0, deadline - time.monotonic()))
            message, at_s = "", 0.0
            with suppress(EOFError):  # it ended without a message
                if process.exitcode is not None and connection.poll():
                    message, at_s = connection.recv()
            found.append(End(process.exitcode, message, at_s))
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()


def _run_rank_on_device(
    scenario: Scenario,
    rank: int,
    port: int,
    has_agent: bool,
    time_limit_s: float,
    connection: Connection,
) -> None:
    """Run a rank whose tensors pass for a device's: gloo is both of the group's backends."""
    failures.SILENCE_LIMIT_S = SILENCE_LIMIT_S
    process_group._backends = lambda: "cpu:gloo,cuda:gloo"
    process_group.is_read_at_once = lambda _: False

    def end_process(message: str) -> None:
        connection.send((message, time.monotonic()))
        os._exit(1)

    failures.end_process = end_process
    _run_rank(scenario, rank, port, has_agent, START_LIMIT_S, connection, time_limit_s)


def _run_rank(
    scenario: Scenario,
    rank: int,
    port: int,
    has_agent: bool,
    time_limit_s: float,
    connection: Connection,
    world_limit_s: float = START_LIMIT_S,
) -> None:
    torch.set_num_threads(1)
    failures.ANSWER_LIMIT_S = ANSWER_LIMIT_S
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": str(has_agent),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
    }
    try:
        with process_group.open_world(world_limit_s):
            group = dist.new_group(range(NUM_RANKS), timeout=timedelta(seconds=time_limit_s))
            scenario(group, lambda: connection.send("begun"))
    except Exception as error:
        connection.send((str(error), time.monotonic()))
        os._exit(1)
    os._exit(0)
