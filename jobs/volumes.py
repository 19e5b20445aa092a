"""State what each step of a run makes, asks for and computes: one function a step.

A step's row in jobs/run_table.py names its function, and jobs.planning multiplies the volumes by
measured rates. Buckets, files and speakers are taken to be of equal size. What changes the days and
dollars of a run by less than some 2 % is left out: the bytes that Parquet adds, the first frames
of utterances, ledgers, validations, repeated requests.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from math import ceil
from typing import TYPE_CHECKING, Literal, Self

from infra.cluster import Cluster
from pipeline.filterbank import FRAME_SHIFT_MS, NUM_BINS
from pipeline.runs.names import (
    ALIGNER,
    ALIGNMENT_STEP,
    DEV,
    HELDOUT,
    LABELLED,
    STUDENT,
    TEACHER,
    UNLABELLED,
    section_of,
)
from training.models.parameter_count import num_parameters

if TYPE_CHECKING:
    from jobs.run_table import Written
    from training.fit.model_specs import Fit
    from training.settings.recipe import Recipe

RECORD_BYTES = 200
"""Mean size of a metadata record: 200 GB for 1e9 utterances (003 IV-B1)."""

AUDIO_BYTES_PER_HOUR = 115.2e6
"""16 kHz WAV of 16 bits; FLAC needs about half."""


@dataclass(frozen=True, slots=True)
class Subset:
    """Subset holds the metadata of one subset by speaker bucket, and the share selected."""

    name: str
    records: int
    metadata_objects: int
    bucket_hours: tuple[float, ...]
    selected: float = 1.0

    @property
    def hours(self) -> float:
        """Return the hours selected."""
        return sum(self.bucket_hours) * self.selected

    @property
    def utterances(self) -> int:
        """Return the number of utterances selected."""
        return max(round(self.records * self.selected), 1)


@dataclass(frozen=True, slots=True)
class Workload:
    """Workload holds all subsets of a run, and the mean size of their records.

    One GET reads the audio of so many utterances: one where each is an object of its own, more
    where they are segments of recordings or members of tar files.
    """

    subsets: tuple[Subset, ...]
    record_bytes: float = RECORD_BYTES
    utterances_per_request: float = 1.0

    def of(self, *names: str) -> list[Subset]:
        """Return the subsets of these names that the run has."""
        return [each for each in self.subsets if each.name in names]

    def hours(self, name: str) -> float:
        """Return the hours selected of one subset, 0 if there is none of that name."""
        return sum(each.hours for each in self.of(name))


@dataclass(frozen=True, slots=True)
class Requests:
    """Requests counts requests to the store by kind."""

    get: float = 0
    put: float = 0
    head: float = 0
    list: float = 0

    @property
    def total(self) -> float:
        """Return the requests of all kinds together."""
        return self.get + self.put + self.head + self.list

    def __add__(self, other: Self) -> Self:
        names = [each.name for each in fields(self)]
        return type(self)(*(getattr(self, name) + getattr(other, name) for name in names))


@dataclass(frozen=True, slots=True)
class ModelPass:
    """ModelPass holds low-rate frames through a model, at a rate of the calibration's devices.

    A trainer keeps a share of that speed. A task that scores in its own process does so on a core.
    """

    rate: Literal["student_training", "teacher_training", "teacher_forward"]
    num_parameters: int
    frames: float
    trainer: str = ""
    on_core: bool = False


@dataclass(frozen=True, slots=True)
class Volume:
    """Volume holds the tasks, objects, requests, bytes and work of a step, or of a part of it.

    `work` is divided by the calibration's rates of a core, by their names: seconds of audio,
    metadata records, logits, low-rate frames; `core_seconds` come on top. A task has
    `gets_in_flight` of its `small_reads` in flight at once; its other GETs follow one another.
    Ranks share work and passes; without ranks they are those of equal tasks. Tasks that spill keep
    all that they read on the local disk.
    """

    tasks: int = 0
    objects: int = 0
    requests: Requests = Requests()
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    work: dict[str, float] = field(default_factory=dict)
    core_seconds: float = 0.0
    passes: tuple[ModelPass, ...] = ()
    small_reads: float = 0.0
    gets_in_flight: int = 1
    num_ranks: int = 0
    spills: bool = False

    def __add__(self, other: Self) -> Self:
        names = {**self.work, **other.work}
        return type(self)(
            tasks=self.tasks + other.tasks,
            objects=self.objects + other.objects,
            requests=self.requests + other.requests,
            bytes_read=self.bytes_read + other.bytes_read,
            bytes_written=self.bytes_written + other.bytes_written,
            work={name: self.work.get(name, 0.0) + other.work.get(name, 0.0) for name in names},
            core_seconds=self.core_seconds + other.core_seconds,
            passes=self.passes + other.passes,
            small_reads=self.small_reads + other.small_reads,
            gets_in_flight=max(self.gets_in_flight, other.gets_in_flight),
            num_ranks=max(self.num_ranks, other.num_ranks),
            spills=self.spills or other.spills,
        )


FRAMES_PER_HOUR = 3_600_000 // FRAME_SHIFT_MS
LOW_RATE_FRAMES_PER_HOUR = FRAMES_PER_HOUR // 3
"""Those of one of the three offsets (003 II-B)."""

COMMIT_BYTES = 1_000
OUTPUT_BYTES = 320
"""Bytes of a task's commit, and of an output's lines in commits and manifest."""

FORWARD_SHARE = 1 / 3
"""Assumed: the forward pass is a third of training's arithmetic."""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """PlannedStep is a step to plan: its run's workload and recipe, its cluster, what it writes."""

    workload: Workload
    recipe: "Recipe"
    cluster: Cluster
    written: "Sequence[Written]"

    def files(self, subset: Subset) -> int:
        """Count a subset's selection files; feature and target shards are as many."""
        files = round(subset.hours / self.recipe.selection.file_hours)
        return min(max(files, self.selection_tasks(subset)), subset.utterances)

    def selection_tasks(self, subset: Subset) -> int:
        """Count the groups of speaker buckets that selection writes at once."""
        files = max(round(subset.hours / self.recipe.selection.file_hours), 1)
        return min(files, len(subset.bucket_hours))

    def feature_bytes(self, subset: Subset) -> float:
        """Return the bytes of feature shards: NUM_BINS values a frame."""
        value_bytes = 2 if self.recipe.features.storage == "float16" else 1
        return subset.hours * FRAMES_PER_HOUR * NUM_BINS * value_bytes

    def aligned_bytes(self, subset: Subset) -> float:
        """Return the bytes of partitions with alignments: features, and 2 bytes a frame."""
        return self.feature_bytes(subset) + 2 * subset.hours * FRAMES_PER_HOUR

    def target_frames(self, subset: Subset) -> float:
        """Count the low-rate frames that a teacher labels: at one offset, or at all three."""
        offsets = 3 if self.recipe.targets.offsets == "all" else 1
        return subset.hours * LOW_RATE_FRAMES_PER_HOUR * offsets

    def target_bytes(self, subset: Subset) -> float:
        """Return the bytes of targets: k senones, k logits and log Z, 2 bytes each, a frame."""
        return self.target_frames(subset) * (4 * self.recipe.targets.k + 2)

    def num_parameters(self, section: str) -> int:
        """Count the parameters of the teacher, or of the student, whose form other models have."""
        models = self.recipe.models
        config = models.teacher if section == TEACHER else models.student
        return num_parameters(config, self.recipe.senones.max_senones)

    def forward(self, model: str, subset: Subset, *, on_core: bool) -> ModelPass:
        """Return the frames of a subset through a model of the run, without a backward pass."""
        frames, section = subset.hours * LOW_RATE_FRAMES_PER_HOUR, section_of(model)
        size = self.num_parameters(section)
        if section == TEACHER:
            return ModelPass("teacher_forward", size, frames, on_core=on_core)
        return ModelPass("student_training", size, FORWARD_SHARE * frames, on_core=on_core)


def _tasks(
    tasks: int,
    shards: int,
    gets: float,
    bytes_read: float,
    bytes_written: float,
    work: dict[str, float],
    passes: Iterable[ModelPass] = (),
) -> Volume:
    """Return the volume of equal tasks, which look for their commits, then write shards and commit.

    One LIST finds earlier commits, and one manifest names all outputs.
    """
    objects = shards + tasks + 1
    return Volume(
        tasks=tasks,
        objects=objects,
        requests=Requests(get=gets + tasks, put=objects, list=1),
        bytes_read=bytes_read,
        bytes_written=bytes_written + tasks * COMMIT_BYTES + shards * OUTPUT_BYTES,
        work=work,
        passes=tuple(passes),
    )


HASHED_BYTES = 95
"""Bytes that selection writes of a record beside its line: in hashes, index and comparison."""

COMPARED_SHARE = 0.48
"""Work of comparing a selected record with another subset's, as a share of selecting it."""

RANGE_BYTES = 2 << 30
"""Metadata whose hashes one task compares: it reads a part of what each bucket's task wrote."""


def selection(step: PlannedStep) -> list[Volume]:
    """Select each subset: hash, sample, index, write files, compare subsets (003 IV-B1)."""
    found, record_bytes = Volume(), step.workload.record_bytes
    compared = len(step.workload.subsets) - 1
    for subset in step.workload.subsets:
        buckets, files = len(subset.bucket_hours), step.files(subset)
        parts = buckets * ceil(subset.records * record_bytes / RANGE_BYTES)
        objects = files + step.selection_tasks(subset) + 6 * (buckets + 1)
        gets = 4 * subset.metadata_objects + files + 6 * parts + compared * (files + 2 * parts)
        found += Volume(
            tasks=3 * buckets + 2 + step.selection_tasks(subset),
            objects=objects,
            requests=Requests(get=gets, put=objects, list=6),
            bytes_read=subset.records * ((6 + compared) * record_bytes + HASHED_BYTES),
            bytes_written=subset.records * HASHED_BYTES + subset.utterances * 2 * record_bytes,
            work={
                "metadata_records_per_s": subset.records
                + COMPARED_SHARE * compared * subset.utterances
            },
        )
    return [found]


def extraction(step: PlannedStep) -> list[Volume]:
    """Extract features: a task a file, one GET an utterance or fewer (003 IV-B2)."""
    found = Volume()
    for subset in step.workload.subsets:
        files, written = step.files(subset), step.feature_bytes(subset)
        reads = ceil(subset.utterances / step.workload.utterances_per_request)
        audio_bytes = subset.hours * AUDIO_BYTES_PER_HOUR
        read = audio_bytes + subset.utterances * step.workload.record_bytes
        work = {"extraction_x_real_time": subset.hours * 3600}
        found += _tasks(files, files, files + reads, read, written, work)
        found += Volume(small_reads=reads, gets_in_flight=step.recipe.features.gets_in_flight)
        if subset.name == UNLABELLED:
            # Each task also keeps the means at which its streams ended, which others gather.
            found += Volume(objects=files, requests=Requests(get=2 * files, put=files))
    return [found]


MEASURED_PASSES = 12
"""The bootstrap's rate was measured with so many iterations."""

STATISTICS_BYTES = 10_000_000
"""The triphones of a shard of five hours, at 650 bytes each, and its phones."""


def bootstrap(step: PlannedStep) -> list[Volume]:
    """Train monophones on one core, align all hours by them, grow the tree, write senones."""
    found, config = list[Volume](), step.recipe.bootstrap
    for labelled in step.workload.of(LABELLED):
        hours = min(config.max_hours or labelled.hours, labelled.hours)
        read = step.feature_bytes(labelled)
        trained = {"bootstrap_x_real_time": hours * 3600 * config.num_iterations / MEASURED_PASSES}
        aligned = {"phones_x_real_time": labelled.hours * 3600}
        found.append(_tasks(1, 1, step.files(labelled), read, 0, trained) + Volume(num_ranks=1))
        found += _with_tree(step, labelled, aligned)
    return found


def realignment(step: PlannedStep) -> list[Volume]:
    """Align by each round's network: a forward pass and a search, a task a feature shard."""
    found, is_regrown = list[Volume](), step.recipe.alignment.regrow_tree
    for written in step.written:
        for subset in step.workload.of(written.hours_of.rpartition("/")[2]):
            work = {"alignment_x_real_time": subset.hours * 3600}
            scored = step.forward(ALIGNER, subset, on_core=True)
            if is_regrown and written.name == ALIGNMENT_STEP:
                found += _with_tree(step, subset, work, [scored])
                continue
            files, read = step.files(subset), step.feature_bytes(subset)
            aligned = step.aligned_bytes(subset)
            found.append(_tasks(files, files, files, read, aligned, work, [scored]))
    return found


def _with_tree(
    step: PlannedStep, subset: Subset, work: dict[str, float], passes: Iterable[ModelPass] = ()
) -> list[Volume]:
    """Align shards by phones; add up their statistics and grow the tree; write their senones."""
    files, read = step.files(subset), step.feature_bytes(subset)
    statistics = files * STATISTICS_BYTES
    return [
        _tasks(files, 2 * files, files, read, statistics, work, passes),
        _tasks(1, 0, files, statistics, 0, {}) + Volume(num_ranks=1),
        _tasks(files, files, 2 * files, read, step.aligned_bytes(subset), {}),
    ]


RAW_LATTICE_BYTES = 30.0
"""Bytes a low-rate frame of AN4's raw lattices at the default beams (measured)."""

DETERMINIZED_ARC_BYTES = 0.72
"""Bytes an arc and low-rate frame of a density, states shared; AN4 at 10 (measured)."""

DETERMINIZING_WORK = 2.0
"""CPU time of determinized lattices over that of raw ones at the default beams; measured."""


def training(step: PlannedStep) -> list[Volume]:
    """Train models one after the other; where sMBR follows, after a search for lattices."""
    labelled, ranks, found = step.workload.of(LABELLED), step.cluster.num_devices, list[Volume]()
    for written in step.written:
        if written.fit is not None and (labelled or written.fit.unlabelled):
            found.append(_trained(step, written.fit, ranks))
        elif written.fit is None:
            model = written.name.rpartition("/")[2]
            for subset in labelled:
                files, scored = step.files(subset), step.forward(model, subset, on_core=False)
                density = step.recipe.sequence_training.lattices.density
                frame_bytes = DETERMINIZED_ARC_BYTES * density if density else RAW_LATTICE_BYTES
                num_bytes = frame_bytes * subset.hours * LOW_RATE_FRAMES_PER_HOUR
                times = DETERMINIZING_WORK if density else 1.0
                work = {"lattices_x_real_time": times * subset.hours * 3600}
                read = step.aligned_bytes(subset)
                searched = _tasks(files, files, files, read, num_bytes, work, [scored])
                found.append(searched + Volume(num_ranks=ranks))
    return found


WEIGHT_BYTES = 4


def _trained(step: PlannedStep, fit: "Fit", num_ranks: int) -> Volume:
    """Train one model: the shards of its sub-epochs, its checkpoints, the model.

    A shard is opened for its lengths (a HEAD, two ranges) and then read whole.
    """
    reads = num_bytes = 0.0
    for sub_epoch in fit.sub_epochs:
        for subset in step.workload.of(LABELLED if sub_epoch.labelled else UNLABELLED):
            labels = step.files(subset), step.aligned_bytes(subset)
            shards, size = labels if sub_epoch.labelled else _partitions(step, subset)
            reads += shards / sub_epoch.num_shares
            num_bytes += size / sub_epoch.num_shares
    frames, is_teacher = (
        training_frames(fit, step.workload),
        fit.model == step.recipe.models.teacher,
    )
    num_parameters = step.num_parameters(TEACHER if is_teacher else STUDENT)
    # A rank's checkpoint has the weights, and what optimizer and trainer keep.
    copies = 1 + fit.training.optimizer.num_state_vectors + fit.training.trainer.num_state_vectors
    saves = len(fit.sub_epochs)
    if fit.checkpoints.steps:
        saves += int(frames / num_ranks / fit.training.minibatch_frames / fit.checkpoints.steps)
    return Volume(
        tasks=num_ranks,
        objects=2 + fit.checkpoints.num_kept * (num_ranks + 1),
        requests=Requests(get=3 * reads, put=2 + saves * (num_ranks + 1), head=reads, list=1),
        bytes_read=num_bytes,
        bytes_written=WEIGHT_BYTES * num_parameters * (1 + copies * saves * num_ranks),
        work={} if fit.criterion == "cross_entropy" else {"sequence_frames_per_s": frames},
        passes=(
            ModelPass(
                rate="teacher_training" if is_teacher else "student_training",
                num_parameters=num_parameters,
                frames=frames,
                trainer=fit.training.trainer.name,
            ),
        ),
        num_ranks=num_ranks,
    )


def training_frames(fit: "Fit", workload: Workload) -> float:
    """Count low-rate frames over all sub-epochs, with those repeated for the delay."""
    found = 0.0
    for sub_epoch in fit.sub_epochs:
        for subset in workload.of(LABELLED if sub_epoch.labelled else UNLABELLED):
            frames = subset.hours * LOW_RATE_FRAMES_PER_HOUR * fit.augmentation.mean_stretch
            found += (frames + fit.model.delay * subset.utterances) / sub_epoch.num_shares
    return found


ALL_OFFSETS_WORK = 2.0
"""CPU time of the targets step at all offsets over that at one, without the teacher; measured."""


def labelling(step: PlannedStep) -> list[Volume]:
    """Label by the teachers, behind a device pool, and select the k best (003 IV-B3)."""
    recipe, found = step.recipe, Volume()
    for subset in step.workload.of(UNLABELLED):
        files, frames = step.files(subset), step.target_frames(subset)
        read, written = step.feature_bytes(subset), step.target_bytes(subset)
        seconds = subset.hours * 3600 * (ALL_OFFSETS_WORK if recipe.targets.offsets == "all" else 1)
        work = {"targets_x_real_time": seconds}
        # A GPU selects the k best itself, in less than a hundredth of a teacher's forward pass.
        if not step.cluster.has_gpus or recipe.targets.tail_samples:
            work["kbest_logits_per_s"] = frames * recipe.senones.max_senones
        # An utterance's alignment to transcripts is planned as a lattice.
        if recipe.targets.source != "logits":
            work["lattices_x_real_time"] = seconds
        for number in range(recipe.targets.rounds):
            # The cost of a user-supplied teacher is unknown: it is planned as the recipe's model.
            models = recipe.num_siblings if number else recipe.num_labelling
            scored = ModelPass("teacher_forward", step.num_parameters(TEACHER), models * frames)
            found += _tasks(files, files, files, read, written, work, [scored])
    return [found]


def repartition(step: PlannedStep) -> list[Volume]:
    """Repartition in each round: a task a group of source shards, which it spills (003 IV-B4)."""
    found = Volume()
    for subset in step.workload.of(UNLABELLED) * step.recipe.targets.rounds:
        groups = ceil(step.files(subset) / step.recipe.partitions.num_source_shards)
        partitions, size = _partitions(step, subset)
        work = {"repartition_x_real_time": subset.hours * 3600}
        found += _tasks(groups, partitions, 2 * step.files(subset), size, size, work)
    return [found + Volume(spills=True)]


def _partitions(step: PlannedStep, subset: Subset) -> tuple[int, float]:
    """Return the number of training partitions and their bytes: features and targets."""
    groups = ceil(step.files(subset) / step.recipe.partitions.num_source_shards)
    made = max(round(subset.hours / step.recipe.partitions.partition_hours), groups)
    num_bytes = step.feature_bytes(subset) + step.target_bytes(subset)
    return min(made, subset.utterances), num_bytes


def evaluation(step: PlannedStep) -> list[Volume]:
    """Tune on the development speakers, if any, and decode the held-out ones, by each model."""
    if not step.workload.of(HELDOUT):
        return []
    recipe, models, found = step.recipe, step.recipe.evaluated_models, []
    for subset in step.workload.of(DEV, HELDOUT):
        files, seconds = step.files(subset), subset.hours * 3600
        times = len(models) * (num_tuned_settings(recipe) if subset.name == DEV else 1)
        work = {"decoding_x_real_time": times * seconds, "alignment_x_real_time": seconds}
        scored = [step.forward(name, subset, on_core=True) for name in models]
        read = step.feature_bytes(subset)
        found.append(_tasks(files, files, files, read, 0, work, scored))
    return found


def num_tuned_settings(recipe: "Recipe") -> int:
    """Count the settings at which tuning decodes for each model: the start, and each other value.

    A model of the user's own has its own order.
    """
    config, grid = recipe.evaluation, recipe.tuning.grid()
    start = {"acoustic_scale": config.acoustic_scale, "ngram_order": config.ngram_order}
    start |= {"language_model_scale": 1.0, "insertion_penalty": 0.0}
    if config.arpa:
        del grid["ngram_order"]
    return 1 + sum(len({*values} - {start[name]}) for name, values in grid.items())


X_REAL_TIME = 1_000.0
"""Hours of speech an hour that a core works through in a step that states no volume."""


def by_hours(step: PlannedStep) -> list[Volume]:
    """Plan a step of which nothing but its speed on a core is known.

    It has one task for each feature shard of each subset whose hours its tasks read, and writes as
    much as it reads.
    """
    found = []
    for written in step.written:
        for subset in step.workload.of(written.hours_of.rpartition("/")[2]):
            files, num_bytes = step.files(subset), step.feature_bytes(subset)
            tasks = _tasks(files, files, files, num_bytes, num_bytes, {})
            found.append(tasks + Volume(core_seconds=subset.hours * 3600 / X_REAL_TIME))
    return found
