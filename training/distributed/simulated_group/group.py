"""Simulate ranks inside one process: threads that take turns and exchange tensors.

One rank runs at a time, so results do not depend on the threads' scheduling, and each rank has its
own torch random state. Trainers see a `torch.distributed.ProcessGroup`, as with real ranks.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from training.distributed.simulated_group.rank_scheduler import RankScheduler
from training.distributed.simulated_group.ring import ring_sum
from training.distributed.simulated_group.shared_device import Moment, SharedDevice

Result = TypeVar("Result")
CPU = SharedDevice()
Combine = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class _Timed:
    """_Timed is a tensor, and the moment from which on it may be read on the device."""

    values: Tensor
    moment: Moment | None


class Exchange:
    """Exchange combines the tensors that all ranks of one group bring to an operation."""

    def __init__(
        self, scheduler: RankScheduler, device: SharedDevice, ranks: Sequence[int]
    ) -> None:
        self.scheduler = scheduler
        self._device = device
        self.ranks = tuple(ranks)
        self._inputs: dict[int, _Timed] = {}
        self._output = _Timed(torch.empty(0), None)
        self._operation = ""
        self._subgroups: dict[tuple[int, ...], Exchange] = {}

    def run(self, rank: int, operation: str, values: Tensor, combine: Combine) -> Tensor:
        """Wait for the values of all ranks; return `combine` of them, in rank order.

        Raises RuntimeError if other ranks are in another operation.
        """
        if self._inputs and operation != self._operation:
            raise RuntimeError(
                f"ranks {sorted(self._inputs)} are in {self._operation}, {rank} in {operation}"
            )
        self._operation = operation
        # The others combine later, when this rank may have overwritten its values.
        self._inputs[rank] = _Timed(values.clone(), self._device.now())
        if len(self._inputs) < len(self.ranks):
            self.scheduler.block(rank, operation)
        else:
            self._combine(combine)
            self.scheduler.unblock([member for member in self.ranks if member != rank])
        self._device.wait_for(self._output.moment, self._output.values)
        return self._output.values

    def _combine(self, combine: Combine) -> None:
        """Combine for all, as the last rank to arrive."""
        inputs = [self._inputs.pop(member) for member in self.ranks]
        for each in inputs:
            self._device.wait_for(each.moment, each.values)
        output = combine([each.values for each in inputs])
        self._output = _Timed(output, self._device.now())

    def subgroup(self, ranks: Sequence[int]) -> "Exchange":
        """Return the exchange of some of the ranks, the same object on each of them."""
        exchange = Exchange(self.scheduler, self._device, ranks)
        return self._subgroups.setdefault(tuple(ranks), exchange)


class _Completed(dist.Work):
    def wait(self, *_: object) -> bool:
        return True


class SimulatedGroup(dist.ProcessGroup):
    """SimulatedGroup is a process group of ranks inside one process, for `collectives`."""

    def __init__(self, world_rank: int, exchange: Exchange) -> None:
        super().__init__(exchange.ranks.index(world_rank), len(exchange.ranks))  # type: ignore[call-arg]
        self._world_rank = world_rank
        self._exchange = exchange

    def subgroup(self, ranks: Sequence[int]) -> "SimulatedGroup | None":
        """Make the group of some of this group's ranks; return None on the other ranks."""
        members = [self._exchange.ranks[rank] for rank in ranks]
        if self._world_rank not in members:
            return None
        return SimulatedGroup(self._world_rank, self._exchange.subgroup(members))

    def pass_turn(self) -> None:
        """Let other ranks queue their work, where this one's runs on a device meanwhile."""
        self._exchange.scheduler.pass_turn(self._world_rank)

    # torch passes options to these four operations; `collectives` and `gather` use none.
    def all_gather_single(  # type: ignore[override]
        self, output: Shaped[Tensor, " all_values"], values: Shaped[Tensor, " values"]
    ) -> dist.Work:
        """Concatenate every rank's `values`, equally many."""
        return self._run(f"an all-gather of {len(values)} values", values, torch.cat, output)

    def all_to_all_single(  # type: ignore[override]
        self,
        output: Shaped[Tensor, " all_parts"],
        values: Shaped[Tensor, " parts"],
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> dist.Work:
        """Give each rank its part of every rank's `values`; parts are equally long."""
        assert not output_sizes
        assert not input_sizes
        operation = f"an all-to-all of {len(values)} values"
        stacked = self._exchange.run(self._world_rank, operation, values, torch.stack)
        output.copy_(stacked.view(self.size(), self.size(), -1)[:, self.rank()].reshape(-1))
        return _Completed()

    def allreduce(self, values: Shaped[Tensor, "..."]) -> dist.Work:  # type: ignore[override]
        """Replace `values` by their sum over the ranks, added in the order of gloo's ring."""
        return self._run(f"a sum of {values.numel()} values", values, ring_sum, values)

    def broadcast(  # type: ignore[override]
        self, values: Shaped[Tensor, " values"], root: int
    ) -> dist.Work:
        """Replace `values` by those of rank `root`."""
        return self._run("a broadcast", values, itemgetter(root), values)

    def _run(self, operation: str, values: Tensor, combine: Combine, output: Tensor) -> dist.Work:
        output.copy_(self._exchange.run(self._world_rank, operation, values, combine))
        return _Completed()


def simulate_ranks(
    num_ranks: int,
    scenario: Callable[..., Result],
    *arguments: object,
    device: SharedDevice = CPU,
) -> list[Result]:
    """Run `scenario(group, *arguments)` on every rank; return the results in rank order.

    On a `SharedGpu` each rank queues its work on a stream of its own: it begins after what the
    caller has queued, and the caller's next work after it. An error on one rank ends the ranks that
    wait for it, and is raised here. Raises DeadlockError if ranks wait for others that have
    finished.
    """
    scheduler = RankScheduler(num_ranks, device)
    world = Exchange(scheduler, device, range(num_ranks))
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    ends: list[Moment | None] = []
    random_state, start = device.random_state(), device.now()

    def run_rank(rank: int) -> None:
        try:
            scheduler.wait(rank)
            with device.working():
                device.wait_for(start)
                device.set_random_state(random_state)
                results[rank] = scenario(SimulatedGroup(rank, world), *arguments)
                ends.append(device.now())
        except BaseException as error:
            errors.append(error)
        finally:
            scheduler.run_next()

    threads = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    scheduler.run_next()
    for thread in threads:
        thread.join()
    for end in ends:
        device.wait_for(end)
    device.set_random_state(random_state)
    if errors:
        # The first error is the cause; ranks that waited for this one fail after it.
        raise errors[0]
    return [results[rank] for rank in range(num_ranks)]
