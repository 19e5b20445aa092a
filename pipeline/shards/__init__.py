"""Shards: Parquet files of features, targets, both joined, and lattices, to and from bytes."""

from pipeline.shards.features import (
    FeatureRow,
    as_stored,
    read_feature_texts,
    read_features,
    write_features,
)
from pipeline.shards.lattices import (
    Lattice,
    LatticeRow,
    read_lattice_rows,
    read_lattices,
    write_lattices,
)
from pipeline.shards.partitions import (
    Alignment,
    PartitionIndex,
    PartitionRow,
    read_partition,
    read_partition_index,
    read_partition_lengths,
    read_partition_provenance,
    read_partition_speakers,
    read_partition_transcripts,
    write_partition,
)
from pipeline.shards.targets import (
    KBestAtAllOffsets,
    StoredKBest,
    TargetRow,
    read_targets,
    stored_rows,
    write_targets,
)

__all__ = [
    "Alignment",
    "FeatureRow",
    "KBestAtAllOffsets",
    "Lattice",
    "LatticeRow",
    "PartitionIndex",
    "PartitionRow",
    "StoredKBest",
    "TargetRow",
    "as_stored",
    "read_feature_texts",
    "read_features",
    "read_lattice_rows",
    "read_lattices",
    "read_partition",
    "read_partition_index",
    "read_partition_lengths",
    "read_partition_provenance",
    "read_partition_speakers",
    "read_partition_transcripts",
    "read_targets",
    "stored_rows",
    "write_features",
    "write_lattices",
    "write_partition",
    "write_targets",
]
