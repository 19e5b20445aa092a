"""Rows of training partitions whose features say which utterance and frame they are."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_BINS, STACK
from pipeline.kbest import KBest, select_kbest
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.manifest import Output
from pipeline.runs.names import PARTITIONS_STEP
from pipeline.shards import Alignment, KBestAtAllOffsets, PartitionRow, write_partition
from pipeline.splicing import num_low_rate_frames
from training.data.dataset import Dataset


def row(number: int, num_frames: int, soft: bool = False) -> PartitionRow:
    """Frame t of utterance n is t, n, n, ...; its label t, or k-best senones at offset n % 3."""
    features = np.full((num_frames, NUM_BINS), number, np.float16)
    features[:, 0] = np.arange(num_frames)
    offset = number % 3
    num_targets = max(num_frames - offset, 0) // 3
    logits = np.random.default_rng(number).normal(size=(num_targets, 9))
    return PartitionRow(
        utterance_id=f"utterance-{number}",
        speaker_id="speaker",
        duration_ms=num_frames * 10,
        text=None,
        features=features,
        targets=select_kbest(logits.astype(np.float32), 4)
        if soft
        else Alignment(np.arange(num_frames, dtype=np.uint16)),
        offset=offset if soft else 0,
    )


def row_at_all_offsets(number: int, num_frames: int) -> PartitionRow:
    """The row above with k-best senones at all offsets, which are its own ones at its own."""
    stored = row(number, num_frames, soft=True)
    parts = []
    for offset in range(STACK):
        count = num_low_rate_frames(num_frames, offset)
        logits = np.random.default_rng([number, offset]).normal(size=(count, 9))
        parts.append(select_kbest(logits.astype(np.float32), 4))
    assert isinstance(stored.targets, KBest)
    parts[stored.offset] = stored.targets
    return replace(stored, targets=KBestAtAllOffsets.of(parts))


def write(store: ObjectStore, run_uri: str, name: str, rows: Sequence[PartitionRow]) -> Output:
    """Store the rows as one training partition."""
    context = step_context(store, run_uri, PARTITIONS_STEP, {}, {})
    return context.put_output(name, ".parquet", write_partition(rows), Tally(len(rows), 0))


def dataset_in(
    folder: Path | str,
    *,
    labelled: Sequence[Sequence[PartitionRow]] = (),
    unlabelled: Sequence[Sequence[PartitionRow]] = (),
) -> Dataset:
    """Store these partitions; one rank's view of them, look-ahead 3, minibatches of 64 frames."""
    store = ObjectStore((str(folder),))
    kinds = [
        tuple(
            write(store, str(folder), f"{kind}-{number}", rows)
            for number, rows in enumerate(partitions)
        )
        for kind, partitions in (("labelled", labelled), ("unlabelled", unlabelled))
    ]
    return Dataset(store, str(folder), *kinds, 3, 64, 5, 0, 1)
