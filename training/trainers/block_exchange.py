"""Average what the models' blocks changed: between all ranks, or their groups' leaders.

Changes are sent exactly or by top-k, and what top-k does not send is kept for later. Of two
tiers, the lower one is small groups of ranks that talk often, and the upper one their leaders.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.distributed import ProcessGroup

from training.algorithms import top_k
from training.distributed import collectives, process_group
from training.distributed.collectives import gather_equal, gather_host_names
from training.distributed.simulated_group import SimulatedGroup
from training.settings.trainers import TopK
from training.trainers.parameters import FlatParameters
from training.trainers.trainer import EntryPath, Rule, norm_of

Mean: TypeAlias = Callable[[Tensor, ProcessGroup], None]
"""Replace values by their mean over a group's ranks, bitwise the same on each."""

RESIDUALS = "block_residuals"


class BlockExchange:
    """BlockExchange averages changes by top-k; what a message leaves out is in a residual.

    A message holds this model's share of the mean, change / N, and the mean is the messages' sum.
    So residuals add up to what the global model still lacks, and a sum over other numbers of
    models is the same. In HTM only a group's leader has a residual other than zeros.
    """

    def __init__(self, code: TopK | None, parameters: FlatParameters) -> None:
        self.code = code
        self._residual = parameters.zeros() if self.code else None

    def mean(self, change: Float[Tensor, " elements"], group: ProcessGroup) -> None:
        """Replace `change` by the mean of what ranks sent; one that is not finite reaches all."""
        assert self.code is not None
        assert self._residual is not None
        message = top_k.take_message(self._residual, change / group.size(), self.code)
        change.zero_()
        # In rank order on each rank, so that all have the same bits.
        for each in gather_equal(message, group, "block changes"):
            top_k.add_message(change, each, self.code)

    def gather_residuals(self, lower: ProcessGroup) -> None:
        """Give a group's leader the residuals that resharding left on others of its ranks."""
        if self._residual is None:
            return
        collectives.all_reduce_sum(self._residual, lower)
        if lower.rank() > 0:
            self._residual.zero_()

    def take_up_residual(self, parameters: FlatParameters, lower: ProcessGroup | None) -> None:
        """Add to the model what more leaders had not sent, as one leader alone sends nothing.

        Only resharding leaves such a residual; `lower` are the leader's ranks, None if it is one.
        """
        if self._residual is None:
            return
        if lower is not None:
            collectives.all_reduce_sum(self._residual, lower)
        if self._residual.any():
            parameters.set_weights(parameters.weights() + self._residual)
            self._residual.zero_()

    def carry_over(self, old: FlatParameters, new: FlatParameters) -> None:
        """Keep the residual of tensors that are still trained; that of frozen ones is dropped."""
        if self._residual is not None:
            self._residual = new.carry_over(self._residual, old)

    def residual_norm(self) -> float:
        """Return the residual's norm, 0 of exact exchanges; waits for its device."""
        return 0.0 if self._residual is None else norm_of(self._residual)

    def state_dict(self, parameters: FlatParameters) -> dict[str, Any]:
        """Copy the residual, by parameter."""
        return {} if self._residual is None else {RESIDUALS: parameters.by_name(self._residual)}

    def load_state_dict(self, state: Mapping[str, Any], parameters: FlatParameters) -> None:
        """Restore `state_dict()`."""
        if self._residual is not None:
            self._residual = parameters.flatten(state[RESIDUALS])


def residual_rules(trainer: Mapping[str, Any]) -> dict[EntryPath, Rule]:
    """Return how other numbers of ranks take the residuals over: nothing of a change is lost."""
    return {("trainer", RESIDUALS): "sum"} if RESIDUALS in trainer else {}


@dataclass(frozen=True, slots=True)
class Tiers:
    """Tiers: groups of `group_size` ranks, and above them their leaders, the first of each group.

    `lower` is this rank's group, None where it is alone in it; `upper` joins the leaders, and is
    None on all other ranks.
    """

    lower: ProcessGroup | None
    upper: ProcessGroup | None

    @classmethod
    def of(cls, group: ProcessGroup, group_size: int, device: torch.device) -> "Tiers":
        """Divide `group` into groups of consecutive ranks; all ranks must call this together.

        Raises ValueError where there are two tiers to make and `group` is not the whole world.
        """
        if group_size == 1:
            return cls(None, group)
        if group_size == group.size():
            return cls(group, None)
        ranks = world_ranks(group)
        parts = [ranks[first : first + group_size] for first in range(0, len(ranks), group_size)]
        subgroups = [subgroup_of(group, part, device) for part in parts]
        upper = subgroup_of(group, ranks[::group_size], device)
        return cls(subgroups[group.rank() // group_size], upper)

    def groups(self) -> set[ProcessGroup]:
        """Return those of this rank."""
        return {group for group in (self.lower, self.upper) if group is not None}

    def average(
        self, values: Float[Tensor, "..."], mean: Mean = collectives.all_reduce_mean
    ) -> None:
        """Replace `values`, the same within a lower group, by their `mean` over the groups."""
        if self.upper is not None:
            # One leader a host crosses the link: 20 MB to a target loss, BMUF's ring 42.
            mean(values, self.upper)
        if self.lower is not None:
            collectives.broadcast(values, self.lower)


def ranks_per_host(group: ProcessGroup, device: torch.device) -> int:
    """Return the number of ranks of each host; all ranks must call this together.

    Raises ValueError where hosts have different numbers of ranks, or ranks that do not follow each
    other: they cannot be the groups of two tiers.
    """
    hosts = gather_host_names(group, device)
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    if len({host for host, _ in runs}) < len(runs) or len({count for _, count in runs}) > 1:
        raise ValueError(
            f"ranks by host: {runs}: need equally many on each host, one host after the other; "
            "start them so, or give group_size"
        )
    return runs[0][1]


def world_ranks(group: ProcessGroup) -> list[int]:
    """Return the ranks of a group that may be divided; ValueError where it is not the world's."""
    if isinstance(group, SimulatedGroup):
        return list(range(group.size()))
    ranks = dist.get_process_group_ranks(group)
    world_size = process_group.default_world().size()
    if len(ranks) != world_size:
        # torch's ways to make a group without the other ranks hang: new_group's names depend on
        # how many groups a rank is in already, gloo's split_group fails every third time.
        raise ValueError(
            f"a group of {len(ranks)} of {world_size} ranks: need the group of all ranks, or "
            "start a world with just these"
        )
    return ranks


def subgroup_of(group: ProcessGroup, ranks: list[int], device: torch.device) -> ProcessGroup | None:
    """Make a group of some ranks, None on the others; all ranks must call this together."""
    if isinstance(group, SimulatedGroup):
        return group.subgroup(ranks)
    # new_group would otherwise take torch's default limit, not that of the group it divides.
    time_limit = group._get_backend(device).options._timeout
    backend = dist.get_backend_config(group)
    with process_group.explaining_failure("making of groups", group):
        subgroup = dist.new_group(ranks, timeout=time_limit, backend=backend)
    return subgroup if isinstance(subgroup, ProcessGroup) else None
