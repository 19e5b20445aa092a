"""Simulate ranks inside one process: threads that take turns and exchange tensors.

One rank runs at a time, so results do not depend on the threads' scheduling, and each rank has its
own torch random state. Trainers see a `torch.distributed.ProcessGroup`, as with real ranks.
"""

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

from training.distributed.simulated_group.exchange import (
    Exchange,
    Operation,
    Receive,
    Send,
)
from training.distributed.simulated_group.link import SimulatedLink
from training.distributed.simulated_group.rank_scheduler import RankScheduler
from training.distributed.simulated_group.ring import ring_sum
from training.distributed.simulated_group.shared_device import Moment, SharedDevice

Result = TypeVar("Result")
CPU = SharedDevice()
AT_ONCE = SimulatedLink()


class SimulatedGroup(dist.ProcessGroup):
    """SimulatedGroup is a process group of ranks inside one process, for `collectives`.

    Each rank has a clock of virtual time, which `advance` moves, and exchanges over `link`.
    """

    def __init__(self, world_rank: int, exchange: Exchange, link: SimulatedLink) -> None:
        super().__init__(exchange.ranks.index(world_rank), len(exchange.ranks))  # type: ignore[call-arg]
        self._world_rank = world_rank
        self._exchange = exchange
        self._link = link

    def subgroup(self, ranks: Sequence[int]) -> "SimulatedGroup | None":
        """Make the group of some of this group's ranks; return None on the other ranks."""
        members = [self._exchange.ranks[rank] for rank in ranks]
        if self._world_rank not in members:
            return None
        return SimulatedGroup(self._world_rank, self._exchange.subgroup(members), self._link)

    def pass_turn(self) -> None:
        """Let other ranks queue their work, where this one's runs on a device meanwhile."""
        self._exchange.scheduler.pass_turn()

    def advance(self, seconds: int | float) -> None:
        """Spend virtual seconds at work; ranks that are earlier than that run first."""
        if seconds < 0:
            raise ValueError(f"{seconds} seconds of work: need at least 0")
        self._exchange.scheduler.reach(self.now() + seconds)

    def now(self) -> float:
        """Return this rank's virtual time, in seconds."""
        return self._exchange.scheduler.now()

    def start_thread(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` in a thread beside this rank's, from its time on; return what waits for it."""
        return self._exchange.scheduler.start_thread(work)

    # torch passes options to these operations; `collectives` and its neighbours use none.
    def all_gather_single(  # type: ignore[override]
        self, output: Shaped[Tensor, " all_values"], values: Shaped[Tensor, " values"]
    ) -> dist.Work:
        """Concatenate every rank's `values`, equally many."""
        operation = Operation(
            f"an all-gather of {len(values)} values",
            lambda inputs: [torch.cat([tensor for tensors in inputs for tensor in tensors])],
            lambda inputs: self._link.gather_s(values.nbytes, len(inputs)),
        )
        return self._start(operation, [values], output)

    def all_to_all_single(  # type: ignore[override]
        self,
        output: Shaped[Tensor, " all_parts"],
        values: Shaped[Tensor, " parts"],
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
    ) -> dist.Work:
        """Give each rank its part of every rank's `values`; without sizes parts are equally long.

        On `wait`, RuntimeError where a part is not as long as its receiver expects.
        """
        sizes = list(input_sizes) or [len(values) // self.size()] * self.size()
        expected = list(output_sizes) or [len(output) // self.size()] * self.size()
        name = "an uneven all-to-all" if input_sizes else f"an all-to-all of {len(values)} values"
        operation = Operation(
            name, lambda inputs: [part for parts in inputs for part in parts], self._direct_s
        )

        def deliver(parts: list[Tensor]) -> None:
            own = parts[self.rank() :: self.size()]
            if [len(part) for part in own] != expected:
                found = [len(part) for part in own]
                raise RuntimeError(f"parts of {found} values for a rank that expects {expected}")
            output.copy_(torch.cat(own))

        tensors = list(values.split_with_sizes(sizes))
        return self._exchange.start(self._world_rank, operation, tensors, deliver)

    def allreduce(self, values: Shaped[Tensor, "..."]) -> dist.Work:  # type: ignore[override]
        """Replace `values` by their sum over the ranks, added in the order of gloo's ring."""
        operation = Operation(
            f"a sum of {values.numel()} values",
            lambda inputs: [ring_sum([tensors[0] for tensors in inputs])],
            lambda inputs: self._link.sum_s(values.nbytes, len(inputs)),
        )
        return self._start(operation, [values], values)

    def broadcast(  # type: ignore[override]
        self, values: Shaped[Tensor, " values"], root: int
    ) -> dist.Work:
        """Replace `values` by those of rank `root`."""
        operation = Operation(
            "a broadcast",
            lambda inputs: inputs[root],
            lambda inputs: self._link.broadcast_s(values.nbytes, len(inputs)),
        )
        return self._start(operation, [values], values)

    def send(self, tensors: list[Tensor], receiver: int, tag: int) -> dist.Work:
        """Send a tensor to a rank, which may receive it later."""
        (values,) = tensors
        message = self._exchange.now_timed([values.clone()], self._link.message_s(values.nbytes))
        self._exchange.mailboxes[self.rank(), receiver, tag].put(message)
        return Send(self._exchange, values.nbytes / self._link.bytes_per_s)

    def recv(self, tensors: list[Tensor], sender: int, tag: int) -> dist.Work:
        """Receive the sender's next tensor of this tag into the one given."""
        (into,) = tensors
        mailbox = self._exchange.mailboxes[sender, self.rank(), tag]
        return Receive(self._exchange, mailbox, into, f"a receive from rank {sender}")

    def _start(self, operation: Operation, tensors: list[Tensor], output: Tensor) -> dist.Work:
        def deliver(results: list[Tensor]) -> None:
            output.copy_(results[0])

        return self._exchange.start(self._world_rank, operation, tensors, deliver)

    def _direct_s(self, inputs: list[list[Tensor]]) -> float:
        """Return the seconds of messages that each rank sends to each other's link at once."""
        if len(inputs) == 1:
            return 0.0
        return self._link.message_s(max(_bytes_to_others(inputs)))


def _bytes_to_others(inputs: list[list[Tensor]]) -> list[int]:
    return [
        sum(part.nbytes for receiver, part in enumerate(parts) if receiver != sender)
        for sender, parts in enumerate(inputs)
    ]


def simulate_ranks(
    num_ranks: int,
    scenario: Callable[..., Result],
    *arguments: object,
    device: SharedDevice = CPU,
    link: SimulatedLink = AT_ONCE,
) -> list[Result]:
    """Run `scenario(group, *arguments)` on every rank; return the results in rank order.

    Ranks exchange over `link` in virtual time. On a `SharedGpu` each rank queues its work on a
    stream of its own: it begins after what the caller has queued, and the caller's next work after
    it. An error on one rank ends the ranks that wait for it, and is raised here. Raises
    DeadlockError if ranks wait for others that have finished.
    """
    scheduler = RankScheduler(num_ranks, device)
    world = Exchange(scheduler, device, range(num_ranks))
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    ends: list[Moment | None] = []
    random_state, start = device.random_state(), device.now()

    def run_rank(rank: int) -> None:
        try:
            scheduler.enter(rank)
            with device.working():
                device.wait_for(start)
                device.set_random_state(random_state)
                results[rank] = scenario(SimulatedGroup(rank, world, link), *arguments)
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
    scheduler.join_started()
    for end in ends:
        device.wait_for(end)
    device.set_random_state(random_state)
    if errors:
        # The first error is the cause; ranks that waited for this one fail after it.
        raise errors[0]
    return [results[rank] for rank in range(num_ranks)]
