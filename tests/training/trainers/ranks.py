"""Real gloo ranks that stay up for the whole test session, and the small things they train."""

import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.training.rank_context import rank_context
from training.settings.trainers import AdaGrad, AdaGradPlace, TopK
from training.trainers import (
    Bmuf,
    D1dPsgd,
    DPsgd,
    Gtc,
    Htm,
    OneBit,
    RandPsgd,
    SparseLoco,
    Synchronous,
    Trainer,
)

START_LIMIT_S = 200  # the ranks import torch, perhaps beside other work
TIME_LIMIT_S = 120  # beside other work a rank may wait seconds for a core
NUM_IMPATIENT = 16  # each test that lets an exchange fail takes one, 11 in all
impatient_groups: list[ProcessGroup] = []


class RankPool:
    """The processes of one world; a scenario runs on the first 1, 2 or 4, or on all of them."""

    def __init__(self, rendezvous: str, world_size: int = 4) -> None:
        context = rank_context()
        pipes = [context.Pipe() for _ in range(world_size)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, world_size, theirs, rendezvous), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        self._num_runs = 0
        started = [connection.poll(START_LIMIT_S) for connection in self._connections]
        assert all(started), f"ranks did not start within {START_LIMIT_S} s"

    def run(self, num_ranks: int, scenario: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Each rank's `scenario(group, *arguments)`, in rank order."""
        replies = self._replies(num_ranks, scenario, arguments)
        errors = [error for error, _ in replies if error]
        assert not errors, "\n".join(errors)
        return [result for _, result in replies]

    def errors(self, num_ranks: int, scenario: Callable[..., Any], *arguments: Any) -> list[str]:
        """The message of each rank's error in `scenario(group, *arguments)`, "" without one."""
        replies = self._replies(num_ranks, scenario, arguments)
        return [message if error else "" for error, message in replies]

    def _replies(
        self, num_ranks: int, scenario: Callable[..., Any], arguments: tuple[Any, ...]
    ) -> list[tuple[str | None, Any]]:
        self._num_runs += 1
        connections = self._connections[:num_ranks]
        for connection in connections:
            connection.send((self._num_runs, num_ranks, scenario, arguments))
        return [self._reply(connection) for connection in connections]

    def _reply(self, connection: Connection) -> tuple[str | None, Any]:
        # What a run that was given up answers late is not taken for the next one's answer.
        while connection.poll(TIME_LIMIT_S):
            number, error, result = connection.recv()
            if number == self._num_runs:
                return error, result
        return "hangs", "hangs"

    def close(self) -> None:
        for connection in self._connections:
            connection.send(None)
        for process in self._processes:
            process.join(5)
            process.kill()


def _serve(rank: int, world_size: int, connection: Connection, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=START_LIMIT_S),
    )
    short, usual = timedelta(seconds=2), timedelta(seconds=TIME_LIMIT_S / 2)
    impatient_groups.extend(dist.new_group(range(2), timeout=short) for _ in range(NUM_IMPATIENT))
    groups = {n: dist.new_group(range(n), timeout=usual) for n in (1, 2, 4, world_size)}
    connection.send((0, None, None))  # started
    while (task := connection.recv()) is not None:
        number, num_ranks, scenario, arguments = task
        try:
            connection.send((number, None, scenario(groups[num_ranks], *arguments)))
        except Exception as error:
            connection.send((number, traceback.format_exc(), str(error)))
    dist.destroy_process_group()


def impatient() -> ProcessGroup:
    """A fresh group of the first two ranks whose exchanges fail after two seconds."""
    return impatient_groups.pop()


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def minibatch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(6, 5, generator=generator)
    return inputs, torch.randint(3, (6,), generator=generator)


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *ranks: int) -> None:
    """One step of an ordinary loop, on the minibatches of `ranks` together."""
    batches = [minibatch(step, rank) for rank in ranks]
    inputs = torch.cat([inputs for inputs, _ in batches])
    targets = torch.cat([targets for _, targets in batches])
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(inputs), targets, reduction="sum") / 6
    loss.backward()
    optimizer.step()


def sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def all_equal(tensors: list[Tensor]) -> bool:
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


MIXING = ("d_psgd", "rand_psgd", "d1d_psgd")
HTM = {"group_size": 2, "block_size": 3, "gradient_threshold": 1 / 64}
TRAINERS: dict[str, tuple[type[Trainer], dict[str, Any]]] = {
    "synchronous": (Synchronous, {}),
    "gtc": (Gtc, {"gradient_threshold": 1 / 64}),
    "bmuf": (Bmuf, {"block_size": 3}),
    "bmuf as printed": (Bmuf, {"block_size": 3, "form": "as_printed", "block_momentum": 0.3}),
    "bmuf average": (Bmuf, {"block_size": 3, "optimizer_state": "average"}),
    "bmuf reset": (Bmuf, {"block_size": 3, "optimizer_state": "reset"}),
    "bmuf top-k": (Bmuf, {"block_size": 3, "block_exchange": TopK(density=0.1)}),
    "sparse_loco": (SparseLoco, {"block_size": 3, "ranks_per_leader": 2}),
    "htm top-k": (Htm, {**HTM, "block_exchange": TopK(density=0.1)}),
    "htm": (Htm, HTM),
    "d_psgd": (DPsgd, {}),
    "rand_psgd": (RandPsgd, {"mixing_seed": 5}),
    "d1d_psgd": (D1dPsgd, {}),
    "one_bit": (OneBit, {}),
    "one_bit partial": (OneBit, {"adagrad": AdaGrad(place=AdaGradPlace.PARTIAL)}),
    "one_bit late": (OneBit, {"num_unquantized_steps": 3}),
    "one_bit double": (OneBit, {"num_unquantized_steps": 3, "double_buffering": True}),
}


def build(group: ProcessGroup, name: str, seed: int = 0) -> tuple[Any, Any, Trainer]:
    """A small model, SGD, whose momentum 1-bit SGD has itself, and the trainer of this name."""
    trainer_class, settings = TRAINERS[name]
    model = small_model(seed)
    optimizer = sgd(model, 0.0 if trainer_class is OneBit else 0.9)
    return model, optimizer, trainer_class(model, optimizer, group=group, **settings)
