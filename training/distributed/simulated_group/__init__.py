"""Ranks inside one process, which take turns on a CPU, or on a GPU that they share."""

from training.distributed.simulated_group.group import SimulatedGroup, simulate_ranks
from training.distributed.simulated_group.link import SimulatedLink

__all__ = ["SimulatedGroup", "SimulatedLink", "simulate_ranks"]
