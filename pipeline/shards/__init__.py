"""Shards: Parquet files of features, of targets, and of both joined, to and from bytes."""

from pipeline.shards.feature_cells import Storage, as_stored
from pipeline.shards.features import FeatureRow, read_features, write_features
from pipeline.shards.partitions import (
    Alignment,
    PartitionRow,
    read_partition,
    read_partition_ids,
    read_partition_lengths,
    read_partition_provenance,
    write_partition,
)
from pipeline.shards.targets import TargetRow, read_targets, write_targets

__all__ = [
    "Alignment",
    "FeatureRow",
    "PartitionRow",
    "Storage",
    "TargetRow",
    "as_stored",
    "read_features",
    "read_partition",
    "read_partition_ids",
    "read_partition_lengths",
    "read_partition_provenance",
    "read_targets",
    "write_features",
    "write_partition",
    "write_targets",
]
