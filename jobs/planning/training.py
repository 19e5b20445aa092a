"""What training reads and computes: the very visits that the recipe's fits will make."""

from functools import cache

import torch

from jobs.planning import shard_sizes
from jobs.planning.object_counts import num_feature_shards, num_partitions
from jobs.planning.step_volumes import features_of, partitions_of
from jobs.planning.volumes import Requests, Volume
from jobs.planning.workload import Subset, Workload
from training.acoustic_model import AcousticModel, ModelConfig
from training.fit import Fit
from training.recipes import Recipe

WEIGHT_BYTES = 4
LARGE_DEAL = 4
"""With so many shards a rank and share, each rank reads whole shards (training.dataset.deal)."""


@cache
def num_parameters(config: ModelConfig, num_senones: int) -> int:
    """Parameters of a model, without making it."""
    with torch.device("meta"):
        model = AcousticModel(config, num_senones)
    return sum(parameter.numel() for parameter in model.parameters())


def num_training_frames(fit: Fit, workload: Workload) -> float:
    """Low-rate frames over all visits, with the look-ahead's repeated last frames."""
    return sum(
        _frames(workload, "labelled" if visit.labelled else "unlabelled", fit) / visit.num_shares
        for visit in fit.visits
    )


def _frames(workload: Workload, subset: str, fit: Fit) -> float:
    utterances = workload.utterances(subset)
    frames = shard_sizes.num_low_rate_frames(workload.hours(subset), utterances)
    return frames + fit.model.look_ahead * utterances


def training_volume(
    fit: Fit, workload: Workload, recipe: Recipe, num_ranks: int, num_senones: int
) -> Volume:
    """Shards read visit by visit, a model written, and a checkpoint a rank and visit; two stay.

    A shard is opened for its lengths (a HEAD, two ranges) and then read whole.
    """
    reads = num_bytes = 0.0
    for visit in fit.visits:
        for subset in workload.subsets:
            if subset.name == ("labelled" if visit.labelled else "unlabelled"):
                shards, size = _shards(subset, recipe)
                whole = shards >= LARGE_DEAL * visit.num_shares * num_ranks
                copies = 1 / visit.num_shares if whole else num_ranks
                reads, num_bytes = reads + copies * shards, num_bytes + copies * size
    weights = WEIGHT_BYTES * num_parameters(fit.model, num_senones)
    checkpoints = len(fit.visits) * num_ranks
    return Volume(
        tasks=num_ranks,
        shards=1,
        objects=2 + 2 * num_ranks + 1,
        requests=Requests(get=3 * reads, put=2 + checkpoints + len(fit.visits), head=reads),
        bytes_read=num_bytes,
        # Adam keeps two more numbers a weight.
        bytes_written=weights + 3 * weights * checkpoints,
    )


def _shards(subset: Subset, recipe: Recipe) -> tuple[int, float]:
    if subset.name == "labelled":
        frames = shard_sizes.num_frames(subset.hours, subset.utterances)
        return num_feature_shards(subset, recipe), features_of(subset, recipe) + 2 * frames
    return num_partitions(subset, recipe), partitions_of(subset, recipe)
