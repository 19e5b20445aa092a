"""Simulate ranks inside one process: threads that take turns and exchange tensors.

One rank runs at a time, so results do not depend on the threads' scheduling, and each rank has its
own torch random state. Trainers see a `torch.distributed.ProcessGroup`, as with real ranks.
"""

import threading
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from training.distributed.rank_scheduler import RankScheduler
from training.distributed.ring import ring_sum

Result = TypeVar("Result")
Combine = Callable[[list[Tensor]], Tensor]


class Exchange:
    """Exchange combines the tensors that all ranks of one group bring to an operation."""

    def __init__(self, scheduler: RankScheduler, ranks: Sequence[int]) -> None:
        self._scheduler = scheduler
        self.ranks = tuple(ranks)
        self._inputs: dict[int, Tensor] = {}
        self._output = torch.empty(0)
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
        self._inputs[rank] = values.clone()
        if len(self._inputs) < len(self.ranks):
            self._scheduler.block(rank, operation)
            return self._output
        # The last rank to arrive combines for all.
        self._output = combine([self._inputs.pop(member) for member in self.ranks])
        self._scheduler.unblock([member for member in self.ranks if member != rank])
        return self._output

    def subgroup(self, ranks: Sequence[int]) -> "Exchange":
        """Return the exchange of some of the ranks, the same object on each of them."""
        return self._subgroups.setdefault(tuple(ranks), Exchange(self._scheduler, ranks))


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
    num_ranks: int, scenario: Callable[..., Result], *arguments: object
) -> list[Result]:
    """Run `scenario(group, *arguments)` on every rank; return the results in rank order.

    An error on one rank ends the ranks that wait for it, and is raised here. Raises DeadlockError
    if ranks wait for others that have finished.
    """
    scheduler = RankScheduler(num_ranks)
    world = Exchange(scheduler, range(num_ranks))
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    random_state = torch.get_rng_state()

    def run_rank(rank: int) -> None:
        try:
            scheduler.wait(rank)
            torch.set_rng_state(random_state)
            results[rank] = scenario(SimulatedGroup(rank, world), *arguments)
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
    torch.set_rng_state(random_state)
    if errors:
        # The first error is the cause; ranks that waited for this one fail after it.
        raise errors[0]
    return [results[rank] for rank in range(num_ranks)]
