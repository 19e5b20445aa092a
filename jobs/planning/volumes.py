"""Compute the volume of each step of a run, with the counts of the steps' own code.

First the mean frames and bytes of shards, in closed form; then the numbers of objects, for buckets
of equal size; then selection, extraction, targets and repartition, the searches of graphs, and
training. Unequal files, ledgers and repeated requests are left out.
"""

from collections.abc import Sequence
from functools import lru_cache
from math import ceil

from infra.store.objects import ObjectInfo
from jobs.planning.workload import Requests, Subset, Volume, Work, Workload
from jobs.run_table import EXTRACT_FEATURES, GENERATE_TARGETS, REPARTITION, SELECT_UTTERANCES
from pipeline.filterbank import FRAME_SHIFT_MS, NUM_BINS
from pipeline.packing import group_buckets
from pipeline.runs.names import ALL_SUBSETS, DEV, LABELLED, UNLABELLED
from pipeline.shards import Offsets, Storage
from pipeline.shards.container import ROW_GROUP_ROWS
from pipeline.splicing import STACK
from pipeline.steps.features import MAX_SHARD_FRAMES
from pipeline.steps.hash_ranges import ENTRY_BYTES as EXTENT_ENTRY_BYTES
from pipeline.steps.hash_ranges import num_gets, num_list_parts
from pipeline.steps.repartition import shard_groups
from pipeline.steps.selection.deduplicate import num_ranges
from pipeline.steps.selection.id_index import ENTRY_BYTES, FILES_A_TASK
from pipeline.steps.selection.subset_overlap import SPAN
from pipeline.steps.selection.subset_overlap import num_ranges as num_compared_ranges
from pipeline.steps.stream_means import GROUP_TASKS, MERGED_RANGES, num_means_ranges
from training.fit.model_specs import Fit, SequenceCriterion
from training.models.parameter_count import num_parameters
from training.settings.recipe import Recipe

FRAMES_PER_HOUR = 3_600_000 // FRAME_SHIFT_MS
# Parquet adds, fitted to shards of 1 to 1,280 rows: a file, a row group, a row with its texts.
_FILE_BYTES, _GROUP_BYTES = 1_500, 800
_FEATURE_ROW_BYTES, _TARGET_ROW_BYTES, _PARTITION_ROW_BYTES = 190, 45, 75


def num_frames(hours: float, utterances: float) -> float:
    """Return frames of 10 ms: t seconds have 100 t - 2 on average, as every window lies within."""
    return max(hours * FRAMES_PER_HOUR - 2 * utterances, 0)


def num_low_rate_frames(hours: float, utterances: float) -> float:
    """Return low-rate frames at one offset: (F - 2) / 3 of F on average over the three."""
    return max((num_frames(hours, utterances) - 2 * utterances) / STACK, 0)


def num_target_frames(hours: float, utterances: float, offsets: Offsets) -> float:
    """Return low-rate frames that the teacher labels: at one offset of each utterance, or all."""
    return num_low_rate_frames(hours, utterances) * (STACK if offsets == "all" else 1)


def feature_bytes(hours: float, utterances: float, shards: float, storage: Storage) -> float:
    """Return the bytes of feature shards: NUM_BINS values a frame."""
    cells = _feature_cells(hours, utterances, storage)
    return cells + _parquet(utterances, shards, _FEATURE_ROW_BYTES)


def target_bytes(
    hours: float, utterances: float, shards: float, k: int, offsets: Offsets = "one"
) -> float:
    """Return the bytes of target shards: k senones, k logits and log Z, 2 bytes each, a frame."""
    frames = num_target_frames(hours, utterances, offsets)
    return frames * (4 * k + 2) + _parquet(utterances, shards, _TARGET_ROW_BYTES)


def partition_bytes(
    hours: float,
    utterances: float,
    partitions: float,
    k: int,
    storage: Storage,
    offsets: Offsets = "one",
) -> float:
    """Return the bytes of training partitions: features and targets side by side."""
    cells = _feature_cells(hours, utterances, storage)
    targets = num_target_frames(hours, utterances, offsets) * (4 * k + 2)
    parquet = _parquet(utterances, partitions, _PARTITION_ROW_BYTES)
    return cells + targets + parquet


def _feature_cells(hours: float, utterances: float, storage: Storage) -> float:
    values = num_frames(hours, utterances) * NUM_BINS
    # A cell of uint8 begins with each bin's range.
    return 2 * values if storage == "float16" else values + utterances * 2 * NUM_BINS * 2


def _parquet(utterances: float, files: float, row_bytes: int) -> float:
    groups = files * ceil(utterances / max(files, 1) / ROW_GROUP_ROWS)
    return files * _FILE_BYTES + groups * _GROUP_BYTES + utterances * row_bytes


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


LIST_PAGE = 1_000
"""Keys a LIST; the store asks twice for each page, since nothing else confirms it."""

HASH_BYTES = 13
"""Bytes that selection stores of a record: its hash, its duration, its share of the speaker."""

COMPARED_SHARE = 0.48
"""Work of hashing a selected record for the comparison of subsets: 10 us of selection's 21."""

INDEXED_SHARE = 0.18
"""Work of an entry in the id index, as a share of a record's (decision 0082)."""

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
    frames = num_target_frames(subset.hours, subset.utterances, offsets)
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


def shard_by_shard(subset: Subset, recipe: Recipe) -> Volume:
    """Compute the volume of a step with a task a feature shard, which writes one as large."""
    read = features_of(subset, recipe)
    return _searched(subset, recipe, read, read, Work())


def features_of(subset: Subset, recipe: Recipe) -> float:
    """Return the bytes of a subset's feature shards."""
    shards, storage = num_feature_shards(subset, recipe), recipe.features.storage
    return feature_bytes(subset.hours, subset.utterances, shards, storage)


def targets_of(subset: Subset, recipe: Recipe) -> float:
    """Return the bytes of a subset's target shards."""
    shards, config = num_feature_shards(subset, recipe), recipe.targets
    counts = subset.hours, subset.utterances, shards
    return target_bytes(*counts, config.k, config.offsets)


def partitions_of(subset: Subset, recipe: Recipe) -> float:
    """Return the bytes of a subset's training partitions."""
    partitions, config = num_partitions(subset, recipe), recipe.targets
    counts = subset.hours, subset.utterances, partitions
    storage = recipe.features.storage
    return partition_bytes(*counts, config.k, storage, config.offsets)


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


LATTICE_BYTES_PER_FRAME = 14.3 * 2.54
"""AN4's lattices have 14.3 arcs a low-rate frame, and an arc 2.54 bytes (measured)."""

SENONE_BYTES = 2
"""An alignment's bytes for each frame of 10 ms."""


def low_rate_frames(subset: Subset) -> float:
    """Count the low-rate frames of a subset at one offset."""
    return num_low_rate_frames(subset.hours, subset.utterances)


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
    frames = num_frames(subset.hours, subset.utterances)
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


WEIGHT_BYTES = 4
WHOLE_SHARDS_A_RANK = 4
"""With so many shards a rank and share, each rank reads whole shards (training.data.row_order)."""


def num_training_frames(fit: Fit, workload: Workload) -> float:
    """Count low-rate frames over all sub-epochs, with those repeated for the delay."""
    return sum(
        _frames(workload, LABELLED if sub_epoch.labelled else UNLABELLED, fit)
        / sub_epoch.num_shares
        for sub_epoch in fit.sub_epochs
    )


def _frames(workload: Workload, subset: str, fit: Fit) -> float:
    utterances = workload.utterances(subset)
    frames = num_low_rate_frames(workload.hours(subset), utterances)
    return frames * fit.augmentation.mean_stretch + fit.model.delay * utterances


def num_validation_frames(fit: Fit, workload: Workload) -> float:
    """Count low-rate frames through all of newbob's validations, which have no backward pass.

    They are of the development speakers, or of the labelled ones that are left out.
    """
    if fit.newbob is None:
        return 0.0
    developed = [low_rate_frames(each) for each in workload.subsets if each.name == DEV]
    labelled = [low_rate_frames(each) for each in workload.subsets if each.name == LABELLED]
    of_one = sum(developed) or sum(labelled) / fit.validation_one_in
    return len(fit.sub_epochs) * of_one


def training_volume(
    fit: Fit, workload: Workload, recipe: Recipe, num_ranks: int, num_senones: int
) -> Volume:
    """Compute the volume of a training step: shards of each sub-epoch, checkpoints, the model.

    A shard is opened for its lengths (a HEAD, two ranges) and then read whole.
    """
    reads = num_bytes = 0.0
    for sub_epoch in fit.sub_epochs:
        for subset in workload.subsets:
            if subset.name == (LABELLED if sub_epoch.labelled else UNLABELLED):
                shards, size = _shards(subset, recipe)
                if isinstance(fit.criterion, SequenceCriterion):
                    size += lattice_bytes(subset)
                whole = shards >= WHOLE_SHARDS_A_RANK * sub_epoch.num_shares * num_ranks
                # Fewer shards are shared in slices, and each rank counts as reading all of them.
                times = 1 / sub_epoch.num_shares if whole else num_ranks
                reads, num_bytes = reads + times * shards, num_bytes + times * size
    frames = num_training_frames(fit, workload)
    work = Work(
        sequence_frames=frames if isinstance(fit.criterion, SequenceCriterion) else 0,
        speed_frames=STACK * frames if fit.augmentation.changes_speed else 0,
        mask_frames=STACK * frames if fit.augmentation.num_masks else 0,
    )
    weights = WEIGHT_BYTES * num_parameters(fit.model, num_senones)
    # A rank's checkpoint has the weights, and what optimizer and trainer keep.
    copies = 1 + fit.training.optimizer.num_state_vectors + fit.training.trainer.num_state_vectors
    saves = len(fit.sub_epochs)
    if fit.checkpoints.steps:
        step_frames = num_ranks * fit.training.minibatch_frames
        # Checkpoints within sub-epochs come on top of those at their ends.
        saves += int(frames / step_frames / fit.checkpoints.steps)
    return Volume(
        tasks=num_ranks,
        shards=1,
        objects=2 + fit.checkpoints.num_kept * (num_ranks + 1),
        requests=Requests(get=3 * reads, put=2 + saves * (num_ranks + 1), head=reads, list=1),
        bytes_read=num_bytes,
        bytes_written=weights * (1 + copies * saves * num_ranks),
        work=work,
    )


def _shards(subset: Subset, recipe: Recipe) -> tuple[int, float]:
    if subset.name == LABELLED:
        return num_feature_shards(subset, recipe), aligned_bytes(subset, recipe)
    return num_partitions(subset, recipe), partitions_of(subset, recipe)
