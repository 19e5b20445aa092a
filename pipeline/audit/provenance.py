"""From a training partition back to the selection files whose utterances it may hold."""

from collections.abc import Sequence
from dataclasses import dataclass

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import Output, read_manifest
from pipeline.runs.names import PARTITIONS_STEP, UNLABELLED, features_step, selection_step
from pipeline.steps.repartition import shard_groups

STEPS = (selection_step(UNLABELLED), features_step(UNLABELLED), PARTITIONS_STEP)


@dataclass(frozen=True, slots=True)
class Sources:
    """The unlabelled subset's selection files and feature shards, and the G of repartition."""

    selection: Sequence[Output]
    features: Sequence[Output]
    num_source_shards: int

    def files_of(self, partition: Output) -> list[int]:
        """Numbers of the selection files that the task which wrote `partition` drew from."""
        groups = shard_groups(len(self.features), self.num_source_shards)
        shards = groups[_task_number(partition)]
        return sorted({_task_number(self.features[shard]) for shard in shards})

    def durations_ms(self) -> list[int]:
        """What each selection file contributed to the feature shards, files of nothing left out."""
        durations: dict[int, int] = {}
        for shard in self.features:
            number = _task_number(shard)
            durations[number] = durations.get(number, 0) + shard.duration_ms
        return list(durations.values())

    def source_ranks(self) -> list[int]:
        """The place of each selection file among all before any shuffle, by speaker bucket."""
        names = [selection.key.rpartition("/")[2] for selection in self.selection]
        ranks = {name: rank for rank, name in enumerate(sorted(names))}
        return [ranks[name] for name in names]


def read_sources(store: ObjectStore, run_uri: str) -> Sources:
    """The sources of a run whose partitions are written."""
    selection, features, partitions = (read_manifest(store, run_uri, step) for step in STEPS)
    num_source_shards = partitions.config["num_source_shards"]
    return Sources(selection.outputs, features.outputs, num_source_shards)


def _task_number(output: Output) -> int:
    """The number of the extraction or repartition task that wrote an object: its name begins so."""
    return int(output.key.rpartition("/")[2].partition("-")[0])
