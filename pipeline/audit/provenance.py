"""Provenance of a training partition: the selection files whose utterances it may hold."""

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import Output, read_manifest
from pipeline.runs.names import PARTITIONS_STEP, UNLABELLED, features_step, selection_step
from pipeline.steps.repartition import shard_groups

STEPS = (selection_step(UNLABELLED), features_step(UNLABELLED), PARTITIONS_STEP)


@dataclass(slots=True)
class _RunSources:
    """Of one run: its files' numbers among all, its shards' tasks, and repartition's groups."""

    files: "array[int]" = field(default_factory=lambda: array("L"))
    shard_tasks: "array[int]" = field(default_factory=lambda: array("L"))
    groups: list[range] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Provenance holds the unlabelled selection files and feature shards, and repartition's G.

    Of a large run both lists lie in the store, in parts. They are read once: for each partition it
    would be 100 parts of a million hours, as often as a certificate has partitions.
    """

    selection: Sequence[Output]
    features: Sequence[Output]
    num_source_shards: int
    _runs: Mapping[str, _RunSources] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Each run of a chain has joined its own shards, and numbered its own files.
        runs: defaultdict[str, _RunSources] = defaultdict(_RunSources)
        for number, file in enumerate(self.selection):
            runs[file.run].files.append(number)
        for shard in self.features:
            runs[shard.run].shard_tasks.append(_task_number(shard))
        for each in runs.values():
            each.groups = shard_groups(len(each.shard_tasks), self.num_source_shards)
        object.__setattr__(self, "_runs", dict(runs))

    def files_of(self, partition: Output) -> list[int]:
        """Return the numbers of the selection files that the task of `partition` read."""
        own = self._runs[partition.run]
        shards = own.groups[_task_number(partition)]
        return sorted({own.files[own.shard_tasks[shard]] for shard in shards})

    def durations_ms(self) -> list[int]:
        """Sum the feature shards of each selection file that has any."""
        durations: dict[tuple[str, int], int] = {}
        for shard in self.features:
            number = shard.run, _task_number(shard)
            durations[number] = durations.get(number, 0) + shard.duration_ms
        return list(durations.values())

    def source_ranks(self) -> list[int]:
        """Rank each selection file among all before any shuffle, by speaker bucket."""
        names = [(each.run, each.key.rpartition("/")[2]) for each in self.selection]
        ranks = {name: rank for rank, name in enumerate(sorted(names))}
        return [ranks[name] for name in names]


def read_provenance(store: ObjectStore, run_uri: str) -> Provenance:
    """Read the provenance of a run whose partitions are written."""
    selection, features, partitions = (read_manifest(store, run_uri, step) for step in STEPS)
    num_source_shards = partitions.config["num_source_shards"]
    return Provenance(selection.outputs, features.outputs, num_source_shards)


def _task_number(output: Output) -> int:
    """Return the number of the task that wrote an object, with which the object's name begins."""
    return int(output.key.rpartition("/")[2].partition("-")[0])
