"""Certify how uniform the order is in which a student, or a torch dataset, reads (003 IV-A2).

The certificate covers the first steps of the first unlabelled sub-epochs, of chunks and of whole
utterances. It reads ids only: of each segment the file, the speaker, and the position before the
shuffles. A step's minibatch is that of all ranks together, over which synchronous trainers sum
gradients. A rank's minibatch drives its model between the exchanges of BMUF and HTM.
"""

import json
import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice, zip_longest
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from jaxtyping import Int64, Shaped

from infra.log_lines import progress_bar
from infra.settings import Range, check_ranges
from infra.store.object_store import ObjectStore, join_uri, scan_checked
from pipeline.runs.engine import StepResult, StepRun, StepSpec, run_step
from pipeline.runs.ledger import SELECTED, read_lines
from pipeline.runs.manifest import Manifest, Output, read_manifest, read_output, sha256, store_again
from pipeline.runs.names import (
    CERTIFICATE_DOCUMENT,
    CERTIFICATE_STEP,
    PARTITIONS_STEP,
    UNLABELLED,
    features_step,
    selection_step,
)
from pipeline.shards import read_partition_provenance
from pipeline.shuffle_quality import (
    LAGS,
    Samples,
    certify,
    expected_effective_number,
    intra_group_correlation,
)
from pipeline.steps.repartition import shard_groups
from training.data.row_order import RowOrder
from training.data.sub_epochs import SubEpoch, check_offsets
from training.fit.model_specs import Fit

if TYPE_CHECKING:
    from training.data.partition_dataset import PartitionDataset  # imports torch


@dataclass(frozen=True, slots=True, eq=False)
class MinibatchRows:
    """MinibatchRows locates one rank's minibatch: each segment's partition, row and first frame."""

    rank: int
    partitions: list[Output]
    rows: Int64[np.ndarray, " segments"]
    starts: Int64[np.ndarray, " segments"]


def sub_epoch_steps(
    order: RowOrder, sub_epoch: SubEpoch, index: int
) -> Iterator[list[MinibatchRows]]:
    """Yield the ranks' minibatches in each step of sub-epoch number `index`.

    A rank that has no minibatch left is missing. Only the lengths of the taken steps are read.
    """
    ranks = (replace(order, rank=rank) for rank in range(order.world_size))
    for step in zip_longest(*(rank_steps(rank, sub_epoch, index) for rank in ranks)):
        yield [minibatch for minibatch in step if minibatch is not None]


def rank_steps(order: RowOrder, sub_epoch: SubEpoch, index: int) -> Iterator[MinibatchRows]:
    """Yield the minibatches of one rank in one sub-epoch, in the order of training."""
    for buffer in order.shuffle_buffers(sub_epoch, index):
        # A buffer numbers its utterances part by part; look up each one's partition and row.
        owners = np.repeat(np.arange(len(buffer.parts)), [len(part.rows) for part in buffer.parts])
        rows = np.concatenate([part.rows for part in buffer.parts])
        for segments in buffer.batches():
            yield MinibatchRows(
                order.rank,
                [buffer.parts[owner].output for owner in owners[segments.utterances]],
                rows[segments.utterances],
                segments.starts,
            )


STEPS = (selection_step(UNLABELLED), features_step(UNLABELLED), PARTITIONS_STEP)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Provenance holds the unlabelled selection files and feature shards, and repartition's G."""

    selection: Sequence[Output]
    features: Sequence[Output]
    num_source_shards: int

    def durations_ms(self) -> list[int]:
        """Sum the feature shards of each selection file that has any."""
        durations: dict[tuple[str, int], int] = {}
        for shard in self.features:
            number = shard.run, _task_number(shard)
            durations[number] = durations.get(number, 0) + shard.duration_ms
        return list(durations.values())


def read_provenance(store: ObjectStore, run_uri: str) -> Provenance:
    """Read the provenance of a run whose partitions are written."""
    selection, features, partitions = (read_manifest(store, run_uri, step) for step in STEPS)
    num_source_shards = partitions.config["num_source_shards"]
    return Provenance(selection.outputs, features.outputs, num_source_shards)


def _task_number(output: Output) -> int:
    """Return the number of the task that wrote an object, with which the object's name begins."""
    return int(output.key.rpartition("/")[2].partition("-")[0])


LINE_BITS = 20
"""Bits of a line's number; a selection file of 2^20 utterances would hold 58 days of speech."""

PROVENANCE = np.dtype(
    [("file", np.int64), ("speaker", np.int64), ("position", np.int64), ("mean_log_z", np.float64)]
)
"""Of a row the numbers of its selection file and speaker, its source position and mean log Z."""


# A group of source shards is read for each of its partitions; 256 files are some 150 MB.
@lru_cache(maxsize=256)
def read_selection_file(
    store: ObjectStore, run_uri: str, output: Output
) -> tuple[dict[str, int], float]:
    """Return each utterance's line in a selection file, and how likely one speaker is.

    That is the probability that two moments of the file are of the same speaker.
    """
    lines: dict[str, int] = {}
    seconds: Counter[str] = Counter()
    for number, fields in enumerate(read_lines(read_output(store, run_uri, output), SELECTED)):
        lines[fields["utterance_id"]] = number
        seconds[fields["speaker_id"]] += fields["duration_s"]
    total = sum(seconds.values())
    # Two moments fall on one speaker with the sum of squared shares of the speech.
    return lines, sum((each / total) ** 2 for each in seconds.values())


class ProvenanceReader:
    """ProvenanceReader finds the provenance of rows; it reads each partition's columns once."""

    def __init__(self, store: ObjectStore, run_uri: str, sources: Provenance) -> None:
        self._store, self._run_uri, self._selection = store, run_uri, sources.selection
        # Of a large run both lists lie in the store, in parts. They are read once: for each
        # partition it would be 100 parts of a million hours. Each run of a chain has joined its own
        # shards, and numbered its own files.
        names, files = [], defaultdict[str, "array[int]"](lambda: array("L"))
        for number, file in enumerate(sources.selection):
            names.append((file.run, file.key.rpartition("/")[2]))
            files[file.run].append(number)
        self._shard_files = defaultdict[str, "array[int]"](lambda: array("L"))
        for shard in sources.features:
            self._shard_files[shard.run].append(files[shard.run][_task_number(shard)])
        self._groups = {
            run: shard_groups(len(shards), sources.num_source_shards)
            for run, shards in self._shard_files.items()
        }
        # Each selection file's rank among all before any shuffle, by speaker bucket.
        ranks = {name: rank for rank, name in enumerate(sorted(names))}
        self._ranks = [ranks[name] for name in names]
        self._speakers: dict[str, int] = {}
        self._partitions: dict[str, Shaped[np.ndarray, " rows"]] = {}
        self._same_speaker: dict[int, float] = {}

    def same_speaker(self) -> float:
        """Return the probability that two moments of a file read so far are of one speaker."""
        return float(np.mean(list(self._same_speaker.values())))

    def read(self, partition: Output) -> Shaped[np.ndarray, " rows"]:
        """Return the PROVENANCE of a partition's rows, in stored order.

        Raises ValueError for an utterance that is in none of the partition's source files.
        """
        if partition.key not in self._partitions:
            self._partitions[partition.key] = self._read_columns(partition)
        return self._partitions[partition.key]

    def _read_columns(self, partition: Output) -> Shaped[np.ndarray, " rows"]:
        uri = partition.uri(self._run_uri)
        utterances, names, mean_log_z = scan_checked(self._store, uri, read_partition_provenance)
        wanted, found = set(utterances), dict[str, tuple[int, int]]()
        shards = self._groups[partition.run][_task_number(partition)]
        files = sorted({self._shard_files[partition.run][shard] for shard in shards})
        for number in files:
            lines, self._same_speaker[number] = read_selection_file(
                self._store, self._run_uri, self._selection[number]
            )
            for name in wanted & lines.keys():
                # Files in source order, then lines within the file.
                found[name] = number, self._ranks[number] << LINE_BITS | lines[name]
        if missing := wanted - found.keys():
            raise ValueError(
                f"{partition.key}: {min(missing)} is in none of its {len(files)} source files: "
                "another version made the partitions; repartition into a fresh --run"
            )
        rows = np.empty(len(utterances), PROVENANCE)
        rows["file"], rows["position"] = zip(*(found[name] for name in utterances), strict=True)
        rows["speaker"] = [self._speakers.setdefault(name, len(self._speakers)) for name in names]
        rows["mean_log_z"] = mean_log_z
        return rows


START_BITS = 20
"""Bits of a segment's first frame."""

TrainingStep = tuple[int, int, list[MinibatchRows]]
"""A sub-epoch, the number of a step in it, and the ranks' minibatches in that step."""


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
                yield index, number, minibatches
                bar.update()


def collect_samples(
    steps: Sequence[TrainingStep], reader: ProvenanceReader, num_ranks: int, num_steps: int
) -> tuple[Samples, Int64[np.ndarray, " samples"]]:
    """Return the samples in order, in one batch a step, and their batches by rank and step."""
    # Batches of different sub-epochs or ranks are further apart than the largest lag.
    stride = num_steps + max(LAGS)
    batches, rank_batches, segments, starts = [], [], [], []
    for sub_epoch, number, minibatches in steps:
        for minibatch in minibatches:
            size, rank = len(minibatch.rows), sub_epoch * num_ranks + minibatch.rank
            batches.append(np.full(size, sub_epoch * stride + number))
            rank_batches.append(np.full(size, rank * stride + number))
            places = zip(minibatch.partitions, minibatch.rows.tolist(), strict=True)
            segments += [reader.read(partition)[row] for partition, row in places]
            starts.append(minibatch.starts)
    found = np.array(segments, PROVENANCE)
    # A chunk's first frame orders the segments of one utterance.
    positions = found["position"] << START_BITS | np.concatenate(starts)
    samples = Samples(
        np.concatenate(batches), found["file"], found["speaker"], positions, found["mean_log_z"]
    )
    return samples, np.concatenate(rank_batches)


ORDER_FIGURES = {"mean_displacement", "median_displacement"}
FORMS = {"chunks": False, "whole_utterances": True}


@dataclass(frozen=True, slots=True)
class CertificateConfig:
    """CertificateConfig selects the first steps of the first unlabelled sub-epochs of a form."""

    num_ranks: Annotated[int, Range(1, 1_000_000)]
    num_steps: Annotated[int, Range(2, 1_000_000)]
    num_sub_epochs: Annotated[int, Range(1, 1_000_000)]

    __post_init__ = check_ranges


def certify_run(
    fit: Fit, store: ObjectStore, run_uri: str, config: CertificateConfig
) -> StepResult:
    """Certify the order; return the manifest, and whether it was there before.

    certificate/certificate.json repeats the manifest's statistics. Each call stores it after the
    manifest is there, so that no other call's certificate replaces it.
    """

    def certify_partitions(step: StepRun) -> Manifest:
        partitions = read_manifest(store, run_uri, PARTITIONS_STEP)
        check_offsets(fit.sub_epochs, fit.training.soft_targets, partitions)
        order = RowOrder(
            store=store,
            run_uri=run_uri,
            labelled=(),
            unlabelled=tuple(partitions.outputs),
            delay=fit.model.delay,
            minibatch_frames=fit.training.minibatch_frames,
            seed=fit.training.seed,
            rank=0,
            world_size=config.num_ranks,
            augmentation=fit.augmentation,
        )
        document = {**asdict(config), **certificate(order, fit.sub_epochs, config)}
        data, tally = _to_bytes(document), partitions.tally_out
        counts = (tally.utterances, tally.duration_ms)
        output = Output(CERTIFICATE_DOCUMENT, len(data), sha256(data), *counts)
        return step.lossless(tally, (output,), document)

    resolved = {**asdict(config), **fit.config}
    spec = StepSpec(store, run_uri, CERTIFICATE_STEP, resolved, STEPS)
    result = run_step(spec, certify_partitions)
    store_again(store, certificate_uri(run_uri), _to_bytes(result.manifest.statistics))
    return result


def _to_bytes(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()


def certificate_uri(run_uri: str) -> str:
    """Return the URI of a run's certificate."""
    return join_uri(run_uri, CERTIFICATE_DOCUMENT)


def certificate(
    order: RowOrder, sub_epochs: Sequence[SubEpoch], config: CertificateConfig
) -> dict[str, Any]:
    """Compute the figures of both forms of sub-epoch; leave out a form of fewer than two steps."""
    sources = read_provenance(order.store, order.run_uri)
    reader = ProvenanceReader(order.store, order.run_uri, sources)
    document: dict[str, Any] = {}
    # The forms mix differently: whole utterances of equal length keep their stored order.
    for form, whole in FORMS.items():
        chosen = [
            index
            for index, sub_epoch in enumerate(sub_epochs)
            if not sub_epoch.labelled and sub_epoch.whole_utterances == whole
        ][: config.num_sub_epochs]
        steps = list(read_steps(order, sub_epochs, chosen, config.num_steps, form))
        if len(steps) > 1:
            document[form] = {
                "sub_epochs": chosen,
                **form_figures(steps, reader, config, order.seed),
            }
    if not document:
        raise ValueError("no sub-epoch has two steps: lower minibatch_frames, or the ranks")
    # In a uniform order of the whole run, files occur in proportion to their hours.
    uniform = 1 / expected_effective_number(np.array(sources.durations_ms()))
    document["uniform_run"] = {
        "effective_files": 1 / uniform,
        "effective_speakers": 1 / (uniform * reader.same_speaker()),
    }
    return document


def form_figures(
    steps: Sequence[TrainingStep], reader: ProvenanceReader, config: CertificateConfig, seed: int
) -> dict[str, Any]:
    """Count the samples of one form; compute the figures of steps' and of ranks' minibatches."""
    samples, rank_batches = collect_samples(steps, reader, config.num_ranks, config.num_steps)
    by_step = certify(samples, seed)
    by_rank = certify(replace(samples, batches=rank_batches), seed)
    # Displacements belong to the order itself, which ranks and steps share.
    for name in ORDER_FIGURES:
        del by_rank[name]
    # Mean log Z replaces the gradient here: it costs one column instead of a training.
    correlation = intra_group_correlation(samples.files, samples.values)
    return {
        "num_steps": len(steps),
        "num_samples": len(samples.files),
        "num_source_files": len(np.unique(samples.files)),
        "num_speakers": len(np.unique(samples.speakers)),
        "intra_file_correlation": finite_or_none(correlation),
        **{
            minibatch: {
                name: {key: finite_or_none(value) for key, value in asdict(figure).items()}
                for name, figure in figures.items()
            }
            for minibatch, figures in (("step", by_step), ("rank", by_rank))
        },
    }


def finite_or_none(value: float) -> float | None:
    """Return a number that JSON can hold: None if it is not finite."""
    return value if math.isfinite(value) else None


BETTER_HIGH = ("effective_files", "effective_speakers", "mean_displacement", "median_displacement")
"""Figures that fall where an order is less mixed; the others rise."""


@dataclass(frozen=True, slots=True)
class DatasetCertificate:
    """DatasetCertificate: the figures as `certify` has them, and those that are too little mixed.

    A figure is, if it lies beyond the range of ten uniform orders by more than the range's width:
    some five standard deviations, which chance makes once in a million figures.
    """

    figures: Mapping[str, Any]
    less_mixed: tuple[str, ...]

    @property
    def is_uniform(self) -> bool:
        """Return whether the order passes for a uniform one."""
        return not self.less_mixed

    @property
    def verdict(self) -> str:
        """Return the verdict as a sentence."""
        if self.is_uniform:
            return "The order is as mixed as uniform orders of the same rows."
        return f"The order is less mixed than uniform orders: {', '.join(self.less_mixed)}."


def certify_dataset(dataset: "PartitionDataset", num_steps: int = 64) -> DatasetCertificate:
    """Certify the first `num_steps` steps of the first six sub-epochs; reads ids, not features.

    ValueError if no sub-epoch has two steps, or `num_steps` is below 2.
    """
    config = CertificateConfig(dataset.dataset.world_size, num_steps, 6)
    figures = certificate(dataset.dataset, dataset.sub_epochs, config)
    less_mixed = [
        f"{form} {minibatch} {name}"
        for form in FORMS
        for minibatch in ("step", "rank")
        for name, figure in figures.get(form, {}).get(minibatch, {}).items()
        if _is_low(name, figure)
    ]
    return DatasetCertificate(figures, tuple(less_mixed))


def _is_low(name: str, figure: Mapping[str, float | None]) -> bool:
    measured, low, high = (figure[each] for each in ("measured", "uniform_low", "uniform_high"))
    if measured is None or low is None or high is None:
        return False
    width = high - low
    return measured < low - width if name in BETTER_HIGH else measured > high + width
