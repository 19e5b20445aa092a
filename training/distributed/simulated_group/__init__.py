"""Ranks inside one process, which take turns on a CPU, or on a GPU that they share."""

from training.distributed.simulated_group.group import SimulatedGroup, simulate_ranks

__all__ = ["SimulatedGroup", "simulate_ranks"]
