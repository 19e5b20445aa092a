"""Compute the volume of each step of the data pipeline, with the counts of the steps' own code.

Unequal files, ledgers and repeated requests are left out.
"""

from collections.abc import Sequence
from math import ceil

from infra.store.objects import ObjectInfo
from jobs.cli.catalogue import EXTRACT_FEATURES, GENERATE_TARGETS, REPARTITION, SELECT_UTTERANCES
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
from pipeline.runs.names import ALL_SUBSETS, UNLABELLED
from pipeline.steps.hash_ranges import ENTRY_BYTES as EXTENT_ENTRY_BYTES
from pipeline.steps.hash_ranges import num_gets, num_list_parts
from pipeline.steps.selection.deduplicate import num_ranges
from pipeline.steps.selection.id_index import ENTRY_BYTES, FILES_A_TASK
from pipeline.steps.selection.subset_overlap import SPAN
from pipeline.steps.selection.subset_overlap import num_ranges as num_compared_ranges
from pipeline.steps.stream_means import GROUP_TASKS, MERGED_RANGES, num_means_ranges
from training.settings.recipe import Recipe

LIST_PAGE = 1_000
"""Keys a LIST; the store asks twice for each page, since nothing else confirms it."""

HASH_BYTES = 13
"""Bytes that selection stores of a record: its hash, its duration, its share of the speaker."""

COMPARED_SHARE = 0.48
"""Work of hashing a selected record for the comparison of subsets: 10 us of selection's 21."""

INDEXED_SHARE = 0.18
"""Work of an entry in the id index, as a share of a record's: `tests.benchmarks.id_index`."""

ALL_OFFSETS_WORK = 2.0
"""CPU time of the targets step at all offsets over that at one, without the teacher; measured."""

COMMIT_BYTES = 1_000
OUTPUT_BYTES = 320
"""Bytes of a commit record, and of an output's lines in a manifest."""


def spark_volumes(workload: Workload, recipe: Recipe) -> dict[str, Volume]:
    """Compute the volumes of the Spark steps, by name, over the subsets that each processes."""
    every = workload.subsets
    # Each round labels and repartitions again.
    sampled = [each for each in every if each.name == UNLABELLED] * recipe.targets.rounds
    return {
        SELECT_UTTERANCES: sum((selection(workload, each, recipe) for each in every), Volume())
        + comparison(workload, recipe),
        EXTRACT_FEATURES: sum((extraction(workload, each, recipe) for each in every), Volume()),
        GENERATE_TARGETS: sum((targets(each, recipe) for each in sampled), Volume()),
        REPARTITION: sum((repartition(each, recipe) for each in sampled), Volume()),
    }


def selection(workload: Workload, subset: Subset, recipe: Recipe) -> Volume:
    """Compute the volume of selecting one subset: index, hash ranges, sample, files (003 IV-B1)."""
    files, groups = num_files(subset, recipe), num_selection_groups(subset, recipe)
    sampled_bytes = subset.utterances * workload.record_bytes
    aside = _scratch(workload, subset, recipe.selection.hours > 0, sampled_bytes)
    index = _id_index(workload, subset, files)
    return aside + index + _step(groups, files, Requests(), 0, sampled_bytes, Work())


def _gathered(objects: int, readers: int) -> Volume:
    """Compute the volume of objects with an extent for each reader, all of which they read."""
    parts = num_list_parts(objects, readers)
    entries = EXTENT_ENTRY_BYTES * objects * readers
    return Volume(
        objects=objects + parts,
        requests=Requests(get=readers * (objects * num_gets(readers) + parts), put=objects + parts),
        bytes_read=entries,
        bytes_written=entries,
    )


def _id_index(workload: Workload, subset: Subset, files: int) -> Volume:
    """Compute the volume of indexing a selection by id: hash what names one, merge by range."""
    tasks = len(subset.bucket_hours) + ceil(files / FILES_A_TASK)
    metadata_bytes = subset.records * workload.record_bytes
    ranges = _num_ranges(metadata_bytes)
    entries = subset.records + subset.utterances
    objects = tasks + 2 * ranges
    # Each task looks for its commit.
    gets = subset.metadata_objects + files + tasks + ranges
    sampled_bytes = subset.utterances * workload.record_bytes
    return Volume(
        tasks=tasks + ranges,
        objects=objects,
        requests=Requests(get=gets, put=objects),
        bytes_read=metadata_bytes + sampled_bytes + ENTRY_BYTES * entries,
        bytes_written=2 * ENTRY_BYTES * entries + (tasks + ranges) * COMMIT_BYTES,
        work=Work(metadata_records=INDEXED_SHARE * entries),
    ) + _gathered(tasks, ranges)


def _num_ranges(metadata_bytes: float) -> int:
    return num_ranges([ObjectInfo("metadata.jsonl", round(metadata_bytes), "")])


def _scratch(workload: Workload, subset: Subset, samples: bool, sampled_bytes: float) -> Volume:
    """Compute selection's own objects: hashes by bucket and range, samples by bucket."""
    buckets, metadata = len(subset.bucket_hours), subset.metadata_objects
    metadata_bytes = subset.records * workload.record_bytes
    ranges, hash_bytes = _num_ranges(metadata_bytes), HASH_BYTES * subset.records
    sample = 1 if samples and subset.name == UNLABELLED else 0
    hashes, objects = _gathered(buckets, ranges), 3 * buckets
    # Metadata is read for its digest, for its hashes and for the sample; then samples. One range of
    # hashes is read again for the sample. Each task of both passes looks for its commit.
    again = sample * hashes.requests.get // ranges
    gets = 3 * metadata + again + buckets + 1 + 2 * buckets + _record(subset)
    return (
        Volume(
            tasks=2 * buckets,
            objects=objects,
            requests=Requests(get=gets, put=objects, list=2 * ceil(metadata / LIST_PAGE) + 1),
            bytes_read=3 * metadata_bytes + hash_bytes * (1 + sample / ranges) + sampled_bytes,
            bytes_written=hash_bytes + sampled_bytes + 2 * buckets * COMMIT_BYTES,
            work=Work(metadata_records=subset.records),
        )
        + hashes
    )


def _record(subset: Subset) -> int:
    """Return the GETs for the record of an increment, which other runs do not have."""
    return 1 if subset.name == UNLABELLED else 0


def comparison(workload: Workload, recipe: Recipe) -> Volume:
    """Compute the volume of comparing each subset's selection with those made before it."""
    every = sorted(workload.subsets, key=lambda each: ALL_SUBSETS.index(each.name))
    return sum(
        (_compared(workload, every[: n + 1], recipe) for n in range(1, len(every))), Volume()
    )


def _compared(workload: Workload, subsets: Sequence[Subset], recipe: Recipe) -> Volume:
    groups = sum(num_selection_groups(each, recipe) for each in subsets)
    files = sum(num_files(each, recipe) for each in subsets)
    utterances = sum(each.utterances for each in subsets)
    # The commits name the files, which are hashed; then the hashes are compared.
    return _gathered(groups, num_compared_ranges(utterances)) + Volume(
        requests=Requests(get=groups + files, list=len(subsets)),
        bytes_read=utterances * (workload.record_bytes + HASH_BYTES + SPAN.itemsize),
        bytes_written=utterances * (HASH_BYTES + SPAN.itemsize),
        work=Work(metadata_records=COMPARED_SHARE * utterances),
    )


def extraction(workload: Workload, subset: Subset, recipe: Recipe) -> Volume:
    """Compute the volume of extraction: a task a file, a GET an utterance (003 IV-B2), or fewer."""
    files, shards = num_files(subset, recipe), num_feature_shards(subset, recipe)
    audio_bytes = subset.hours * workload.audio_bytes_per_hour
    read = audio_bytes + subset.utterances * workload.record_bytes
    written = features_of(subset, recipe)
    # 1.18 requests an utterance were measured and planned; a million hours have 1e9 utterances.
    reads = ceil(subset.utterances / workload.utterances_per_request)
    requests = Requests(get=files + reads + 3 + _record(subset))
    work = Work(extracted_seconds=subset.hours * 3600)
    extracted = _step(files, shards, requests, read, written, work, reads)
    return extracted + (_stream_means(subset, files) if subset.name == UNLABELLED else Volume())


def _stream_means(subset: Subset, files: int) -> Volume:
    """Compute the volume of keeping where streams ended: by file, by group, by range of hashes."""
    ranges, groups = num_means_ranges(subset.utterances), ceil(files / GROUP_TASKS)
    merges = ceil(ranges / MERGED_RANGES)
    objects = files + groups + ranges + merges
    # Groups read the files' commits and means; each task looks for its own commit.
    gets = 2 * files + groups + merges
    # No more streams than utterances; the bytes of real ones are a fraction of a percent.
    return _gathered(groups, merges) + Volume(
        tasks=groups + merges, objects=objects, requests=Requests(get=gets, put=objects, list=1)
    )


def targets(subset: Subset, recipe: Recipe) -> Volume:
    """Compute the volume of targets: one task a feature shard, without the teacher (003 IV-B3)."""
    shards = num_feature_shards(subset, recipe)
    read, written = features_of(subset, recipe), targets_of(subset, recipe)
    offsets = recipe.targets.offsets
    frames = shard_sizes.num_target_frames(subset.hours, subset.utterances, offsets)
    logits = frames * recipe.senones.max_senones
    seconds = subset.hours * 3600 * (ALL_OFFSETS_WORK if offsets == "all" else 1)
    searched = seconds if recipe.targets.source == "lattice" else 0
    work = Work(labelled_seconds=seconds, kbest_logits=logits, lattice_seconds=searched)
    return _step(shards, shards, Requests(get=shards + 4 + _record(subset)), read, written, work)


def repartition(subset: Subset, recipe: Recipe) -> Volume:
    """Compute the volume of repartition: one task a group of source shards (003 IV-B4)."""
    shards, groups = num_feature_shards(subset, recipe), num_partition_groups(subset, recipe)
    read = features_of(subset, recipe) + targets_of(subset, recipe)
    written = partitions_of(subset, recipe)
    work = Work(repartitioned_seconds=subset.hours * 3600)
    requests = Requests(get=2 * shards + 5 + _record(subset))
    return _step(groups, num_partitions(subset, recipe), requests, read, written, work)


def features_of(subset: Subset, recipe: Recipe) -> float:
    """Return the bytes of a subset's feature shards."""
    shards, storage = num_feature_shards(subset, recipe), recipe.features.storage
    return shard_sizes.feature_bytes(subset.hours, subset.utterances, shards, storage)


def targets_of(subset: Subset, recipe: Recipe) -> float:
    """Return the bytes of a subset's target shards."""
    shards, config = num_feature_shards(subset, recipe), recipe.targets
    counts = subset.hours, subset.utterances, shards
    return shard_sizes.target_bytes(*counts, config.k, config.offsets)


def partitions_of(subset: Subset, recipe: Recipe) -> float:
    """Return the bytes of a subset's training partitions."""
    partitions, config = num_partitions(subset, recipe), recipe.targets
    counts = subset.hours, subset.utterances, partitions
    storage = recipe.features.storage
    return shard_sizes.partition_bytes(*counts, config.k, storage, config.offsets)


def _step(
    tasks: int,
    shards: int,
    requests: Requests,
    bytes_read: float,
    bytes_written: float,
    work: Work,
    small_reads: float = 0,
) -> Volume:
    # A step writes its shards, a commit a task and a manifest; one LIST finds earlier commits, and
    # each task looks for its own.
    objects = shards + tasks + 1
    records = tasks * COMMIT_BYTES + shards * OUTPUT_BYTES
    common = Requests(get=tasks, put=objects, list=1)
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
