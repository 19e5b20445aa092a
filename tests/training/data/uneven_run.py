"""A run whose partitions are as uneven as a test wants them; features name their utterance."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_BINS
from pipeline.kbest import select_kbest
from pipeline.normalization import Moments
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.engine import write_manifest
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import ALIGNMENT_STEP, PARTITIONS_STEP
from pipeline.shards import Alignment, PartitionRow, write_partition

NUM_SENONES = 6
Lengths = Sequence[Sequence[int]]
"""Of every partition, the frames of each of its utterances."""


def speech(number: int, num_frames: int) -> tuple[np.ndarray, np.ndarray]:
    """Frames that tell their senone by which bins are raised, but bin 0 `number`; the senones."""
    generator = np.random.default_rng(number)
    senones = generator.integers(0, NUM_SENONES, -(-num_frames // 9)).repeat(9)[:num_frames]
    frames = generator.normal(size=(num_frames, NUM_BINS)) + 2 * np.eye(NUM_BINS)[senones * 10 + 1]
    frames[:, 0] = number
    return frames.astype(np.float16), senones.astype(np.uint16)


def row(number: int, num_frames: int, soft: bool) -> PartitionRow:
    """Utterance `number` with hard senones, or with a teacher's logits that are mostly right."""
    features, senones = speech(number, num_frames)
    logits = 4 * np.eye(NUM_SENONES, dtype=np.float32)[senones[1::3]]
    return PartitionRow(
        utterance_id=f"utterance-{number}",
        speaker_id="speaker",
        duration_ms=num_frames * 10,
        text=None,
        features=features,
        targets=select_kbest(logits[: num_frames // 3], 3) if soft else Alignment(senones),
        offset=0,
    )


def write_uneven_run(
    folder: Path, labelled: Lengths, unlabelled: Lengths
) -> tuple[ObjectStore, str]:
    """All that fitting reads; utterances are numbered from 1 on, the labelled ones first."""
    run_uri = str(folder)
    store = ObjectStore((run_uri,))
    moments = Moments.of(speech(1, 900)[0]).to_dict()
    for subset in ("labelled", "unlabelled"):
        _write_step(store, run_uri, f"features/{subset}", [], moments=moments)
    numbers = iter(range(1, 10_000))
    counts = [100] * NUM_SENONES
    _write_step(
        store, run_uri, ALIGNMENT_STEP, _rows(labelled, False, numbers), senone_counts=counts
    )
    rows = _rows(unlabelled, True, numbers)
    _write_step(store, run_uri, PARTITIONS_STEP, rows, offsets="one")
    return store, run_uri


def _rows(lengths: Lengths, soft: bool, numbers: Iterator[int]) -> list[list[PartitionRow]]:
    return [
        [row(next(numbers), num_frames, soft) for num_frames in partition] for partition in lengths
    ]


def _write_step(
    store: ObjectStore,
    run_uri: str,
    step: str,
    partitions: Sequence[Sequence[PartitionRow]],
    **statistics: object,
) -> None:
    context = step_context(store, run_uri, step, {}, {})
    outputs = tuple(
        context.put_output(f"{index:06d}", ".parquet", write_partition(rows), _tally(rows))
        for index, rows in enumerate(partitions)
    )
    total = sum((output.tally for output in outputs), Tally())
    manifest = Manifest(
        step, {}, {}, outputs, tally_in=total, tally_out=total, statistics=statistics
    )
    write_manifest(context, manifest)


def _tally(rows: Sequence[PartitionRow]) -> Tally:
    return Tally(len(rows), sum(row.duration_ms for row in rows))
