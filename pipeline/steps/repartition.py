"""Repartition: features and targets joined into training partitions (paper 003 IV-B4).

A task joins G source shards with their targets and spreads their utterances over its partitions,
so that each partition holds rows of all G, without a shuffle between machines. G = 1 is the paper.
One shard or one partition is in memory at a time; the group lies on local disk meanwhile.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from tempfile import TemporaryFile

import numpy as np

from infra.spark.task_resources import local_folder
from infra.store.object_store import ObjectStore
from pipeline.kbest import KBest
from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext, once
from pipeline.runs.engine import (
    Distribute,
    Extension,
    NumberedTasks,
    StepResult,
    StepRun,
    StepSpec,
    TaskPlan,
    run_step,
    run_tasks,
)
from pipeline.runs.manifest import Manifest, Output, read_manifest
from pipeline.runs.names import ONLY_ROUND, UNLABELLED, TargetsRound, features_step
from pipeline.settings import RepartitionConfig
from pipeline.shards import (
    Alignment,
    KBestAtAllOffsets,
    PartitionRow,
    read_features,
    read_targets,
    stored_rows,
    write_partition,
)
from pipeline.shuffling import shuffle, shuffled_order


class SpilledRows:
    """Rows of k-best targets whose tensors lie in an unnamed file, which ends with the process."""

    def __init__(self) -> None:
        self._file = TemporaryFile(dir=local_folder())  # noqa: SIM115 - closed when we are collected
        self._rows: list[tuple[PartitionRow, int]] = []

    def extend(self, rows: Iterable[PartitionRow]) -> None:
        """Move rows to disk."""
        for row in rows:
            arrays = _tensors(row)
            # A broadcast zero keeps shape and type, and takes no memory.
            hollow = [np.broadcast_to(np.zeros((), array.dtype), array.shape) for array in arrays]
            self._rows.append((_with_tensors(row, hollow), self._file.tell()))
            for array in arrays:
                self._file.write(array.tobytes())
        self._file.flush()

    @property
    def durations_ms(self) -> list[int]:
        """The rows' declared durations, in the order of arrival."""
        return [row.duration_ms for row, _ in self._rows]

    def load(self, number: int) -> PartitionRow:
        """Read one row back."""
        row, first_byte = self._rows[number]
        arrays = []
        for hollow in _tensors(row):
            data = os.pread(self._file.fileno(), hollow.nbytes, first_byte)
            arrays.append(np.frombuffer(data, hollow.dtype).reshape(hollow.shape))
            first_byte += hollow.nbytes
        return _with_tensors(row, arrays)


def _tensors(row: PartitionRow) -> tuple[np.ndarray, ...]:
    assert not isinstance(row.targets, Alignment), "only rows with soft targets are spilled"
    kbest = stored_rows(row.targets)
    return row.features, kbest.senones, kbest.logits, kbest.log_z


def _with_tensors(row: PartitionRow, arrays: Sequence[np.ndarray]) -> PartitionRow:
    assert not isinstance(row.targets, Alignment), "only rows with soft targets are spilled"
    features, *columns = arrays
    kbest = KBest(*columns, tail_samples=stored_rows(row.targets).tail_samples)
    is_at_all = isinstance(row.targets, KBestAtAllOffsets)
    return replace(row, features=features, targets=KBestAtAllOffsets(kbest) if is_at_all else kbest)


@dataclass(frozen=True, slots=True)
class GroupTask:
    """G feature shards with their target shards."""

    context: StepContext
    config: RepartitionConfig
    name: str
    features: tuple[Output, ...]
    targets: tuple[Output, ...]


def repartition(
    store: ObjectStore,
    run_uri: str,
    config: RepartitionConfig,
    distribute: Distribute,
    targets_round: TargetsRound = ONLY_ROUND,
) -> StepResult:
    """Write the training partitions of the unlabelled subset, a task for each group of shards.

    An increment writes those of its own shards; its manifest has the base's too, in one order.
    """
    sources = (features_step(UNLABELLED), targets_round.targets)
    shuffled = partial(shuffle, seed=config.seed)

    def write_partitions(step: StepRun) -> Manifest:
        extracted, labelled = (read_manifest(store, run_uri, source) for source in sources)
        features, targets = extracted.own_outputs, labelled.own_outputs

        def task(name: str, group: range) -> GroupTask:
            shards = slice(group.start, group.stop)
            return GroupTask(step.context, config, name, features[shards], targets[shards])

        plan = TaskPlan(
            NumberedTasks(shard_groups(len(features), config.num_source_shards), task),
            write_group,
            distribute,
            loss_budget=0.0,  # joining loses nothing: each target row has its feature row
            statistics=lambda _: {"offsets": labelled.config["offsets"]},
            order=shuffled,
            size=lambda task: sum(output.duration_ms for output in task.features),
        )
        return run_tasks(step, plan)

    # Nights are mixed again: a sub-epoch that hears one night alone would forget the others.
    extension = Extension(lambda _, own: own, order=shuffled)
    spec = StepSpec(
        store, run_uri, targets_round.partitions, asdict(config), sources, extension=extension
    )
    return run_step(spec, write_partitions)


def shard_groups(num_shards: int, num_source_shards: int) -> list[range]:
    """Cut the shards, in order, into the fewest groups of at most G, sizes within one."""
    num_groups = -(-num_shards // num_source_shards)
    # 17 shards and G = 16 make groups of 8 and 9, not of 16 and 1.
    edges = [num_shards * number // max(num_groups, 1) for number in range(num_groups + 1)]
    return [range(first, last) for first, last in pairwise(edges)]


@once
def write_group(task: GroupTask) -> Commit:
    """Join one group and write its partitions."""
    # In memory a group of 16 would take 4.5 GB; on disk the task needs 0.6.
    rows = SpilledRows()
    for pair in zip(task.features, task.targets, strict=True):
        rows.extend(join(task, *pair))
    durations = rows.durations_ms
    tally = Tally(len(durations), sum(durations))
    # A partition so draws from all G shards: design effect 1.14 at G = 16, 2.77 at 1.
    order = shuffled_order(len(durations), task.config.seed, "partition", task.name).tolist()
    parts = balance(order, durations, num_partitions(tally, task.config))
    outputs = tuple(
        task.context.put_output(
            f"{task.name}-{number:05d}",
            ".parquet",
            write_partition([rows.load(row) for row in part]),
            Tally(len(part), sum(durations[row] for row in part)),
        )
        for number, part in enumerate(parts)
    )
    record = Commit(task.name, task.context.fingerprint, outputs, tally_in=tally)
    return task.context.commit(record)


def num_partitions(tally: Tally, config: RepartitionConfig) -> int:
    """Count the partitions of about `partition_hours` for these hours, at most one a row.

    n partitions have partition_hours within the factor 1 +- 1/(2n); one alone may have less.
    """
    return min(max(round(tally.hours / config.partition_hours), 1), tally.utterances)


def balance(order: Sequence[int], durations_ms: Sequence[int], num_parts: int) -> list[list[int]]:
    """Give each row, in order, to the part with the fewest milliseconds so far.

    So no two parts differ by more than the longest row.
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    filled = [0] * num_parts
    for row in order:
        emptiest = filled.index(min(filled))
        parts[emptiest].append(row)
        filled[emptiest] += durations_ms[row]
    return parts


def join(task: GroupTask, features: Output, targets: Output) -> Iterator[PartitionRow]:
    """Yield features with their targets, which are in the same order.

    An utterance that the teacher failed at has none, and is left out.
    """
    feature_rows = iter(read_features(task.context.read(features)))
    for target in read_targets(task.context.read(targets)):
        name = target.utterance_id
        row = next((each for each in feature_rows if each.utterance_id == name), None)
        if row is None:
            raise ValueError(
                f"{targets.key}: {name} is not in {features.key}, or not in that "
                "order; generate the targets again into a fresh --run"
            )
        yield PartitionRow(
            utterance_id=row.utterance_id,
            speaker_id=row.speaker_id,
            duration_ms=row.duration_ms,
            text=None,
            features=row.features,
            targets=target.kbest,
            offset=target.offset,
            storage=row.storage,
            placement=row.placement,
        )
