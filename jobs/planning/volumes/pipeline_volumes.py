"""The volume of each step of the data pipeline: counts as the steps' own code makes them.

Files that come out unequal, ledgers and repeated requests are not foreseen.
"""

from math import ceil

from infra.store.objects import ObjectInfo
from jobs.planning.volumes import shard_sizes
from jobs.planning.volumes.object_counts import (
    num_feature_shards,
    num_files,
    num_partition_groups,
    num_partitions,
    num_selection_groups,
)
from jobs.planning.volumes.step_volume import Requests, Volume, Work
from jobs.planning.volumes.workload import Subset, Workload
from pipeline.runs.names import UNLABELLED
from pipeline.steps.selection.budget_cutoff import num_ranges
from training.recipes import Recipe

LIST_PAGE = 1_000
"""Keys a LIST answers; each is asked twice, since nothing else confirms it."""

HASH_BYTES = 13
"""What selection keeps of a record to compare it: a hash, its duration, and its speaker's share."""

COMMIT_BYTES = 1_000
OUTPUT_BYTES = 320
"""A commit record, and an output's lines in a manifest."""


def spark_volumes(workload: Workload, recipe: Recipe) -> dict[str, Volume]:
    """The data pipeline's steps, by name, over the subsets that each works through."""
    every = workload.subsets
    drawn = [each for each in every if each.name == UNLABELLED]
    return {
        "select_utterances": sum((selection(workload, each, recipe) for each in every), Volume()),
        "extract_features": sum((extraction(workload, each, recipe) for each in every), Volume()),
        "generate_targets": sum((targets(each, recipe) for each in drawn), Volume()),
        "repartition": sum((repartition(each, recipe) for each in drawn), Volume()),
    }


def selection(workload: Workload, subset: Subset, recipe: Recipe) -> Volume:
    """Metadata digested, surveyed, compared range by range, drawn from, and packed (IV-B1)."""
    files, groups = num_files(subset, recipe), num_selection_groups(subset, recipe)
    drawn_bytes = subset.utterances * workload.record_bytes
    aside = _scratch(workload, subset, recipe.selection.hours > 0, drawn_bytes)
    return aside + _step(groups, files, Requests(), 0, drawn_bytes, Work())


def _scratch(workload: Workload, subset: Subset, draws: bool, drawn_bytes: float) -> Volume:
    """What selection keeps for itself: hashes by bucket and range, and what is drawn by bucket."""
    buckets, metadata = len(subset.bucket_hours), subset.metadata_objects
    metadata_bytes = subset.records * workload.record_bytes
    ranges = num_ranges([ObjectInfo("metadata.jsonl", round(metadata_bytes), "")])
    hashes, hash_bytes = buckets * ranges, HASH_BYTES * subset.records
    draw = 1 if draws and subset.name == UNLABELLED else 0
    objects = hashes + 3 * buckets
    # Metadata digested, surveyed, drawn from; hashes compared; what is drawn, packed.
    gets = 3 * metadata + hashes + draw * buckets + buckets + 1
    return Volume(
        tasks=2 * buckets,
        objects=objects,
        requests=Requests(get=gets, put=objects, list=2 * ceil(metadata / LIST_PAGE) + 1),
        bytes_read=3 * metadata_bytes + hash_bytes * (1 + draw / ranges) + drawn_bytes,
        bytes_written=hash_bytes + drawn_bytes + 2 * buckets * COMMIT_BYTES,
        work=Work(metadata_records=subset.records),
    )


def extraction(workload: Workload, subset: Subset, recipe: Recipe) -> Volume:
    """One task a selection file: a GET an utterance, its feature shards out (IV-B2)."""
    files, shards = num_files(subset, recipe), num_feature_shards(subset, recipe)
    audio_bytes = subset.hours * workload.audio_bytes_per_hour
    read = audio_bytes + subset.utterances * workload.record_bytes
    written = features_of(subset, recipe)
    requests = Requests(get=files + subset.utterances + 3)
    work = Work(extracted_seconds=subset.hours * 3600)
    return _step(files, shards, requests, read, written, work, subset.utterances)


def targets(subset: Subset, recipe: Recipe) -> Volume:
    """One task a feature shard; its target shard out (IV-B3). The teacher's own work is apart."""
    shards = num_feature_shards(subset, recipe)
    read, written = features_of(subset, recipe), targets_of(subset, recipe)
    frames = shard_sizes.num_low_rate_frames(subset.hours, subset.utterances)
    logits = frames * recipe.senones.max_senones
    work = Work(labelled_seconds=subset.hours * 3600, kbest_logits=logits)
    return _step(shards, shards, Requests(get=shards + 4), read, written, work)


def repartition(subset: Subset, recipe: Recipe) -> Volume:
    """One task a group of G shards with their targets; training partitions out (IV-B4)."""
    shards, groups = num_feature_shards(subset, recipe), num_partition_groups(subset, recipe)
    read = features_of(subset, recipe) + targets_of(subset, recipe)
    written = partitions_of(subset, recipe)
    work = Work(repartitioned_seconds=subset.hours * 3600)
    requests = Requests(get=2 * shards + 5)
    return _step(groups, num_partitions(subset, recipe), requests, read, written, work)


def features_of(subset: Subset, recipe: Recipe) -> float:
    """Bytes of a subset's feature shards."""
    shards, storage = num_feature_shards(subset, recipe), recipe.features.storage
    return shard_sizes.feature_bytes(subset.hours, subset.utterances, shards, storage)


def targets_of(subset: Subset, recipe: Recipe) -> float:
    """Bytes of a subset's target shards."""
    shards, k = num_feature_shards(subset, recipe), recipe.targets.k
    return shard_sizes.target_bytes(subset.hours, subset.utterances, shards, k)


def partitions_of(subset: Subset, recipe: Recipe) -> float:
    """Bytes of a subset's training partitions."""
    partitions, k = num_partitions(subset, recipe), recipe.targets.k
    storage = recipe.features.storage
    return shard_sizes.partition_bytes(subset.hours, subset.utterances, partitions, k, storage)


def _step(
    tasks: int,
    shards: int,
    requests: Requests,
    bytes_read: float,
    bytes_written: float,
    work: Work,
    small_reads: float = 0,
) -> Volume:
    # Every step leaves its shards, a commit a task and a manifest; one LIST finds old commits.
    objects = shards + tasks + 1
    records = tasks * COMMIT_BYTES + shards * OUTPUT_BYTES
    common = Requests(put=objects, list=1)
    return Volume(
        tasks,
        shards,
        objects,
        requests + common,
        bytes_read,
        bytes_written + records,
        work,
        small_reads,
    )
