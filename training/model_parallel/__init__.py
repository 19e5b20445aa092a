"""Divide a model's output units among a few ranks: model parallelism (paper 004 section 4 c, 5.5).

Layers exchange activations. A data-parallel trainer joins the ranks that hold the same units.
"""

from training.model_parallel.ranks import ParallelRanks
from training.model_parallel.split_model import merged_state, split_model

__all__ = ["ParallelRanks", "merged_state", "split_model"]
