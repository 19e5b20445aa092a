"""Sample a training order: the provenance of all segments of its first steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from jaxtyping import Int64

from infra.log_lines import progress_bar
from pipeline.shuffle_quality import LAGS, Samples
from training.data.row_order import RowOrder
from training.data.sub_epochs import SubEpoch
from training.shuffle_audit.reading_order import MinibatchRows, sub_epoch_steps
from training.shuffle_audit.row_provenance import ProvenanceReader, RowProvenance

START_BITS = 20


@dataclass(frozen=True, slots=True, eq=False)
class TrainingStep:
    """TrainingStep holds the ranks' minibatches in step `number` of a sub-epoch."""

    sub_epoch: int
    number: int
    minibatches: list[MinibatchRows]


def read_steps(
    order: RowOrder,
    sub_epochs: Sequence[SubEpoch],
    chosen: Sequence[int],
    num_steps: int,
    form: str,
) -> Iterator[TrainingStep]:
    """Yield the first `num_steps` steps of each of the chosen sub-epochs."""
    total = len(chosen) * num_steps
    with progress_bar(description=f"certify {form}", total=total, unit="step") as bar:
        for index in chosen:
            steps = sub_epoch_steps(order, sub_epochs[index], index)
            for number, minibatches in enumerate(islice(steps, num_steps)):
                yield TrainingStep(index, number, minibatches)
                bar.update()


def collect_samples(
    steps: Sequence[TrainingStep], reader: ProvenanceReader, num_ranks: int, num_steps: int
) -> tuple[Samples, Int64[np.ndarray, " samples"]]:
    """Return the samples in order, in one batch a step, and their batches by rank and step."""
    # Batches of different sub-epochs or ranks are further apart than the largest lag.
    stride = num_steps + max(LAGS)
    batches, rank_batches = [], []
    minibatches = [minibatch for step in steps for minibatch in step.minibatches]
    for step in steps:
        for minibatch in step.minibatches:
            size = len(minibatch.rows)
            rank = step.sub_epoch * num_ranks + minibatch.rank
            batches.append(np.full(size, step.sub_epoch * stride + step.number))
            rank_batches.append(np.full(size, rank * stride + step.number))
    sources = [_provenance_of(minibatch, reader) for minibatch in minibatches]
    samples = Samples(
        np.concatenate(batches),
        np.concatenate([each.files for each in sources]),
        np.concatenate([each.speakers for each in sources]),
        np.concatenate(
            [
                # A chunk's first frame orders the segments of one utterance.
                each.positions << START_BITS | minibatch.starts
                for each, minibatch in zip(sources, minibatches, strict=True)
            ]
        ),
        np.concatenate([each.mean_log_z for each in sources]),
    )
    return samples, np.concatenate(rank_batches)


def _provenance_of(minibatch: MinibatchRows, reader: ProvenanceReader) -> RowProvenance:
    """Return the provenance of each segment of a minibatch."""
    partitions = [reader.read(partition) for partition in minibatch.partitions]
    rows = list(zip(partitions, minibatch.rows.tolist(), strict=True))
    return RowProvenance(
        np.array([partition.files[row] for partition, row in rows]),
        np.array([partition.speakers[row] for partition, row in rows]),
        np.array([partition.positions[row] for partition, row in rows]),
        np.array([partition.mean_log_z[row] for partition, row in rows]),
    )
