"""Ranks inside one process: threads that take turns, and meet as the ranks of a real group do.

One rank runs at a time, so results do not depend on the threads' scheduling, and torch's random
state is each rank's own. Trainers cannot tell: the group is a `torch.distributed.ProcessGroup`.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from training.distributed.ring import ring_sum

Result = TypeVar("Result")
Join = Callable[[list[Tensor]], Tensor]


class DeadlockError(RuntimeError):
    """All ranks that have not finished wait for others; the message says who waits where."""


class Turns:
    """Whose turn it is: one rank runs, some may run next, the others wait for exchanges."""

    def __init__(self, num_ranks: int) -> None:
        self._wakes = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._ready = deque(range(num_ranks))
        self._waiting: dict[int, str] = {}
        self._deadlock: DeadlockError | None = None

    def wait(self, rank: int) -> None:
        """Sleep until it is this rank's turn; raise DeadlockError where none will come."""
        self._wakes[rank].acquire()
        if self._deadlock is not None:
            raise self._deadlock

    def yield_until_met(self, rank: int, what: str) -> None:
        """Let others run until the exchange that this rank waits for is complete."""
        self._waiting[rank] = what
        random = torch.get_rng_state()
        self.pass_on()
        self.wait(rank)
        torch.set_rng_state(random)

    def resume(self, ranks: Sequence[int]) -> None:
        """Put ranks that have met in the queue."""
        for rank in ranks:
            self._waiting.pop(rank, None)
            self._ready.append(rank)

    def pass_on(self) -> None:
        """Wake the next rank; where all that are left wait, wake them to end in an error."""
        if self._ready:
            self._wakes[self._ready.popleft()].release()
        elif self._waiting and self._deadlock is None:
            where = ", ".join(f"rank {rank} in {what}" for rank, what in self._waiting.items())
            self._deadlock = DeadlockError(
                f"the ranks that have not finished wait for others: {where}. All ranks must take "
                "the same number of steps"
            )
            for rank in self._waiting:
                self._wakes[rank].release()


class Meeting:
    """Where the ranks of one group exchange tensors."""

    def __init__(self, turns: Turns, ranks: Sequence[int]) -> None:
        self._turns = turns
        self.ranks = tuple(ranks)
        self._brought: dict[int, Tensor] = {}
        self._joined = torch.empty(0)
        self._what = ""
        self._parts: dict[tuple[int, ...], Meeting] = {}

    def exchange(self, rank: int, what: str, values: Tensor, join: Join) -> Tensor:
        """Bring `values`; what `join` makes, once, of those of all ranks, in rank order.

        Raises RuntimeError where others are in another exchange.
        """
        if self._brought and what != self._what:
            raise RuntimeError(
                f"ranks {sorted(self._brought)} are in {self._what}, {rank} in {what}"
            )
        self._what = what
        self._brought[rank] = values.clone()
        if len(self._brought) < len(self.ranks):
            self._turns.yield_until_met(rank, what)
            return self._joined
        self._joined = join([self._brought.pop(member) for member in self.ranks])
        self._turns.resume([member for member in self.ranks if member != rank])
        return self._joined

    def part(self, ranks: Sequence[int]) -> "Meeting":
        """Where some of the ranks meet; the same for all that ask."""
        return self._parts.setdefault(tuple(ranks), Meeting(self._turns, ranks))


class _Done(dist.Work):
    def wait(self, *_: object) -> bool:
        return True


class SimulatedGroup(dist.ProcessGroup):
    """The exchanges of `training.distributed.collectives`, between ranks inside one process."""

    def __init__(self, world_rank: int, meeting: Meeting) -> None:
        super().__init__(meeting.ranks.index(world_rank), len(meeting.ranks))  # type: ignore[call-arg]
        self._world_rank = world_rank
        self._meeting = meeting

    def divide(self, ranks: Sequence[int]) -> "SimulatedGroup | None":
        """Make the group of some of this group's ranks; None on a rank that is not among them."""
        members = [self._meeting.ranks[rank] for rank in ranks]
        if self._world_rank not in members:
            return None
        return SimulatedGroup(self._world_rank, self._meeting.part(members))

    # Of torch's options for these four, `collectives` uses none.
    def all_gather_single(  # type: ignore[override]
        self, output: Shaped[Tensor, " all_values"], values: Shaped[Tensor, " values"]
    ) -> dist.Work:
        """Concatenate every rank's `values`, equally many."""
        return self._exchange(f"an all-gather of {len(values)} values", values, torch.cat, output)

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
        what = f"an all-to-all of {len(values)} values"
        joined = self._meeting.exchange(self._world_rank, what, values, torch.stack)
        output.copy_(joined.view(self.size(), self.size(), -1)[:, self.rank()].reshape(-1))
        return _Done()

    def allreduce(self, values: Shaped[Tensor, "..."]) -> dist.Work:  # type: ignore[override]
        """Replace `values` by their sum over the ranks, added up in the order of gloo's ring."""
        return self._exchange(f"a sum of {values.numel()} values", values, ring_sum, values)

    def broadcast(  # type: ignore[override]
        self, values: Shaped[Tensor, " values"], root: int
    ) -> dist.Work:
        """Replace `values` by those of rank `root`."""
        return self._exchange("a broadcast", values, itemgetter(root), values)

    def _exchange(self, what: str, values: Tensor, join: Join, output: Tensor) -> dist.Work:
        output.copy_(self._meeting.exchange(self._world_rank, what, values, join))
        return _Done()


def simulate_ranks(
    num_ranks: int, scenario: Callable[..., Result], *arguments: object
) -> list[Result]:
    """Run `scenario(group, *arguments)` on every rank; the results, in rank order.

    An error ends the ranks that wait for the one that raised it, and is raised here. Raises
    DeadlockError where ranks wait for others that have finished.
    """
    turns = Turns(num_ranks)
    world = Meeting(turns, range(num_ranks))
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    random = torch.get_rng_state()

    def live(rank: int) -> None:
        try:
            turns.wait(rank)
            torch.set_rng_state(random)
            results[rank] = scenario(SimulatedGroup(rank, world), *arguments)
        except BaseException as error:
            errors.append(error)
        finally:
            turns.pass_on()

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    turns.pass_on()
    for thread in threads:
        thread.join()
    torch.set_rng_state(random)
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(num_ranks)]
