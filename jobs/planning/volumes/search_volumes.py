"""Compute the volume of steps that search graphs: alignment, lattices, tuning and evaluation."""

from collections.abc import Sequence

from jobs.planning.volumes import shard_sizes
from jobs.planning.volumes.object_counts import num_feature_shards
from jobs.planning.volumes.pipeline_volumes import features_of
from jobs.planning.volumes.step_volume import Requests, Volume, Work
from jobs.planning.volumes.workload import Subset
from training.settings.recipe import Recipe

LATTICE_BYTES_PER_FRAME = 14.3 * 2.54
"""AN4's lattices have 14.3 arcs a low-rate frame, and an arc 2.54 bytes (RESULTS.md)."""

SENONE_BYTES = 2
"""An alignment's bytes for each frame of 10 ms."""


def low_rate_frames(subset: Subset) -> float:
    """Count the low-rate frames of a subset at one offset."""
    return shard_sizes.num_low_rate_frames(subset.hours, subset.utterances)


def bootstrap(labelled: Subset, recipe: Recipe) -> Volume:
    """Compute the volume of the bootstrap: all shards are read, at most `max_hours` are aligned."""
    hours = min(recipe.bootstrap.max_hours or labelled.hours, labelled.hours)
    written = aligned_bytes(labelled, recipe) * hours / labelled.hours
    work = Work(bootstrapped_seconds=hours * 3600)
    return _searched(labelled, recipe, features_of(labelled, recipe), written, work)


def realignment(subset: Subset, recipe: Recipe) -> Volume:
    """Compute the volume of one round: a task a feature shard, which writes a partition."""
    work = Work(aligned_seconds=subset.hours * 3600)
    read, written = features_of(subset, recipe), aligned_bytes(subset, recipe)
    return _searched(subset, recipe, read, written, work)


def lattices(labelled: Subset, recipe: Recipe) -> Volume:
    """Compute the volume of one model's lattices: a task a partition of the labelled data."""
    work = Work(lattice_seconds=labelled.hours * 3600)
    return _searched(
        labelled, recipe, aligned_bytes(labelled, recipe), lattice_bytes(labelled), work
    )


def decoding(subset: Subset, recipe: Recipe, num_models: int, num_settings: int) -> Volume:
    """Compute the volume of decoding a subset by each model at each of its settings."""
    seconds = subset.hours * 3600 * num_models
    work = Work(decoded_seconds=seconds * num_settings, aligned_seconds=subset.hours * 3600)
    return _searched(subset, recipe, features_of(subset, recipe), 0, work)


def num_tuned_settings(recipe: Recipe) -> int:
    """Count the settings at which tuning decodes for each model: the start, and each other value.

    A model of the user's own has its own order.
    """
    config = recipe.evaluation
    start = {"acoustic_scale": config.acoustic_scale, "ngram_order": config.ngram_order}
    grid: dict[str, Sequence[float]] = dict(recipe.tuning.grid())
    if config.arpa:
        del grid["ngram_order"]
    unchanged = {"language_model_scale": 1.0, "insertion_penalty": 0.0} | start
    return 1 + sum(len({*values} - {unchanged[name]}) for name, values in grid.items())


def aligned_bytes(subset: Subset, recipe: Recipe) -> float:
    """Return the bytes of a subset's partitions with alignments."""
    frames = shard_sizes.num_frames(subset.hours, subset.utterances)
    return features_of(subset, recipe) + SENONE_BYTES * frames


def lattice_bytes(subset: Subset) -> float:
    """Return the bytes of one model's lattices of a subset."""
    return LATTICE_BYTES_PER_FRAME * low_rate_frames(subset)


def _searched(
    subset: Subset, recipe: Recipe, bytes_read: float, bytes_written: float, work: Work
) -> Volume:
    shards = num_feature_shards(subset, recipe)
    return Volume(
        tasks=shards,
        shards=shards,
        objects=2 * shards + 1,
        # A task reads its shard and looks for its commit; it writes an object and the commit.
        requests=Requests(get=2 * shards + 4, put=2 * shards + 1, list=1),
        bytes_read=bytes_read,
        bytes_written=bytes_written,
        work=work,
    )
