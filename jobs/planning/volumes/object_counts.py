"""Count the objects of each step by the pipeline's own rules, for buckets of equal size."""

from functools import lru_cache
from math import ceil

from jobs.planning.volumes.shard_sizes import num_frames
from jobs.planning.volumes.workload import Subset
from pipeline.packing import group_buckets
from pipeline.steps.features import MAX_SHARD_FRAMES
from pipeline.steps.repartition import shard_groups
from training.settings.recipe import Recipe


def num_files(subset: Subset, recipe: Recipe) -> int:
    """Count the selection files of all groups of buckets."""
    file_hours = recipe.selection.file_hours
    files = sum(max(1, round(hours / file_hours)) for hours in _groups_hours(subset, file_hours))
    return min(files, subset.utterances)


def num_selection_groups(subset: Subset, recipe: Recipe) -> int:
    """Count the tasks that write selection files."""
    return len(_groups_hours(subset, recipe.selection.file_hours))


@lru_cache(maxsize=16)
def _groups_hours(subset: Subset, file_hours: float) -> tuple[float, ...]:
    hours = [each * subset.selected for each in subset.bucket_hours]
    # The step's own function, not a copy of its rule, keeps plan and run equal.
    groups = group_buckets([round(each * 3_600_000) for each in hours], file_hours)
    return tuple(sum(hours[group.start : group.stop]) for group in groups)


def num_feature_shards(subset: Subset, recipe: Recipe) -> int:
    """Count feature or target shards: one a selection file, more if the file is long."""
    files = num_files(subset, recipe)
    frames = num_frames(subset.hours, subset.utterances) / files
    return files * max(ceil(frames / MAX_SHARD_FRAMES), 1)


@lru_cache(maxsize=16)
def num_partition_groups(subset: Subset, recipe: Recipe) -> int:
    """Count the tasks of repartition."""
    return len(_shard_groups(subset, recipe))


@lru_cache(maxsize=16)
def num_partitions(subset: Subset, recipe: Recipe) -> int:
    """Count the training partitions of all groups of shards."""
    a_shard = subset.hours / num_feature_shards(subset, recipe) / recipe.partitions.partition_hours
    groups = _shard_groups(subset, recipe)
    made = sum(max(round(len(group) * a_shard), 1) for group in groups)
    return min(made, subset.utterances)


def _shard_groups(subset: Subset, recipe: Recipe) -> list[range]:
    return shard_groups(num_feature_shards(subset, recipe), recipe.partitions.num_source_shards)
