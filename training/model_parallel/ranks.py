"""Divide ranks into those that share a model's units, and those that share its data."""

from dataclasses import dataclass

import torch

from training.distributed.process_group import ProcessGroup
from training.trainers.tiers import subgroup_of, world_ranks


@dataclass(frozen=True, slots=True)
class ParallelRanks:
    """ParallelRanks: `model` divides the units; `data` trains this rank's with a trainer.

    Paper 004 writes K x M: K data-parallel nodes of M GPUs each. Ranks of a node follow each other.
    """

    model: ProcessGroup
    data: ProcessGroup

    @classmethod
    def of(cls, world: ProcessGroup, num_parts: int) -> "ParallelRanks":
        """Divide the world's ranks; all must call this together, before other groups are made.

        ValueError where the number of ranks is no multiple of `num_parts`.
        """
        if num_parts < 1 or world.size() % num_parts:
            raise ValueError(
                f"num_parts = {num_parts}: need a divisor of {world.size()}, the number of ranks"
            )
        ranks, device = world_ranks(world), torch.device("cpu")
        nodes = [ranks[first : first + num_parts] for first in range(0, len(ranks), num_parts)]
        peers = [ranks[part::num_parts] for part in range(num_parts)]
        models = [subgroup_of(world, node, device) for node in nodes]
        datas = [subgroup_of(world, same, device) for same in peers]
        model = models[world.rank() // num_parts]
        data = datas[world.rank() % num_parts]
        assert model is not None
        assert data is not None
        return cls(model, data)
