"""The certificate of a run: how uniform the order is in which its student reads (003 IV-A2).

Looked at are the first steps of the first unlabelled sub-epochs, of chunks and of whole utterances,
by ids alone. A step's minibatch is that of all ranks together, over which synchronous trainers
sum gradients; a rank's own is what drives its model between the exchanges of BMUF and HTM.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np
from jaxtyping import Int64
from tqdm import tqdm

from infra.store.object_store import ObjectStore, join_uri
from pipeline.audit.provenance import STEPS, read_sources
from pipeline.runs.commit import finished_manifest, step_context, write_manifest
from pipeline.runs.manifest import Manifest, input_digests, read_manifest
from pipeline.runs.names import CERTIFICATE_STEP, PARTITIONS_STEP
from pipeline.shuffle_quality.certificate import LAGS, Figure, Samples, certify
from pipeline.shuffle_quality.design_effect import (
    expected_effective_number,
    intra_group_correlation,
)
from training.data.dataset import Dataset
from training.fit.model_specs import Fit
from training.shuffle_audit.reading_order import Reading, sub_epoch_steps
from training.shuffle_audit.row_provenance import OriginReader, Origins

START_BITS = 20
ORDER_FIGURES = {"mean_displacement", "median_displacement"}
FORMS = {"chunks": False, "whole_utterances": True}


@dataclass(frozen=True, slots=True)
class CertificateConfig:
    """Look at up to `num_steps` steps of the first `num_sub_epochs` unlabelled ones of a form."""

    num_ranks: int
    num_steps: int
    num_sub_epochs: int

    def __post_init__(self) -> None:
        for name, least in (("num_ranks", 1), ("num_steps", 2), ("num_sub_epochs", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} = {getattr(self, name)}: need at least {least}")


def certify_run(
    fit: Fit, store: ObjectStore, run_uri: str, config: CertificateConfig
) -> tuple[Manifest, bool]:
    """Write certificate/certificate.json; the manifest, and whether it was done before."""
    inputs = input_digests(store, run_uri, STEPS)
    resolved = {**asdict(config), **asdict(fit)}
    context = step_context(store, run_uri, CERTIFICATE_STEP, resolved, inputs)
    if (done := finished_manifest(context)) is not None:
        return done, True
    partitions = read_manifest(store, run_uri, PARTITIONS_STEP)
    dataset = Dataset(
        store=store,
        run_uri=run_uri,
        labelled=(),
        unlabelled=partitions.outputs,
        look_ahead=fit.model.look_ahead,
        minibatch_frames=fit.loop.minibatch_frames,
        seed=fit.seed,
        rank=0,
        world_size=config.num_ranks,
    )
    document = {**asdict(config), **certificate(dataset, fit, config)}
    data = (json.dumps(document, indent=1, sort_keys=True) + "\n").encode()
    store.put(certificate_uri(run_uri), data)
    tally = partitions.tally_out
    manifest = Manifest(
        CERTIFICATE_STEP, resolved, inputs, (), tally_in=tally, tally_out=tally, statistics=document
    )
    write_manifest(context, manifest)
    return manifest, False


def certificate_uri(run_uri: str) -> str:
    """Where the certificate of a run lies."""
    return join_uri(run_uri, CERTIFICATE_STEP, "certificate.json")


def read_certificate(store: ObjectStore, run_uri: str) -> dict[str, Any]:
    """The certificate of a run, empty if it has none."""
    uri = certificate_uri(run_uri)
    found: dict[str, Any] = json.loads(store.get(uri)) if store.exists(uri) else {}
    return found


def certificate(dataset: Dataset, fit: Fit, config: CertificateConfig) -> dict[str, Any]:
    """The figures of both forms of sub-epoch; a form of fewer than two steps is left out."""
    sources = read_sources(dataset.store, dataset.run_uri)
    reader = OriginReader(dataset.store, dataset.run_uri, sources)
    document: dict[str, Any] = {}
    for form, whole in FORMS.items():
        sub_epochs = [
            index
            for index, sub_epoch in enumerate(fit.sub_epochs)
            if not sub_epoch.labelled and sub_epoch.whole_utterances == whole
        ][: config.num_sub_epochs]
        steps = list(read_steps(dataset, fit, sub_epochs, config.num_steps, form))
        if len(steps) > 1:
            document[form] = {
                "sub_epochs": sub_epochs,
                **form_figures(steps, reader, config, dataset.seed),
            }
    if not document:
        raise ValueError("no sub-epoch has two steps: lower student.minibatch_frames, or --ranks")
    uniform = 1 / expected_effective_number(np.array(sources.durations_ms()))
    document["uniform_run"] = {
        "effective_files": 1 / uniform,
        "effective_speakers": 1 / (uniform * reader.same_speaker()),
    }
    return document


def read_steps(
    dataset: Dataset, fit: Fit, sub_epochs: Sequence[int], num_steps: int, form: str
) -> Iterator[tuple[int, int, list[Reading]]]:
    """SubEpoch, step and what the ranks read in it."""
    with tqdm(total=len(sub_epochs) * num_steps, desc=f"certify {form}", unit="step") as bar:
        for index in sub_epochs:
            steps = sub_epoch_steps(dataset, fit.sub_epochs[index], index)
            for step, readings in enumerate(islice(steps, num_steps)):
                yield index, step, readings
                bar.update()


def form_figures(
    steps: Sequence[tuple[int, int, list[Reading]]],
    reader: OriginReader,
    config: CertificateConfig,
    seed: int,
) -> dict[str, Any]:
    """What was looked at, and the figures of steps' and of ranks' minibatches."""
    samples, ranks = gather(steps, reader, config)
    by_step, by_rank = certify(samples, seed), certify(samples.in_batches(ranks), seed)
    for name in ORDER_FIGURES:
        del by_rank[name]
    correlation = intra_group_correlation(samples.files, samples.values)
    return {
        "num_steps": len(steps),
        "num_samples": len(samples.files),
        "num_source_files": len(np.unique(samples.files)),
        "num_speakers": len(np.unique(samples.speakers)),
        "intra_file_correlation": finite(correlation),
        "step": {name: finite_figure(figure) for name, figure in by_step.items()},
        "rank": {name: finite_figure(figure) for name, figure in by_rank.items()},
    }


def gather(
    steps: Sequence[tuple[int, int, list[Reading]]],
    reader: OriginReader,
    config: CertificateConfig,
) -> tuple[Samples, Int64[np.ndarray, " samples"]]:
    """The samples in their order, divided by steps; and the number of each one's rank's step."""
    # Numbers so far apart that no lag compares different sub-epochs or ranks.
    stride = config.num_steps + max(LAGS)
    batches, ranks, parts = [], [], []
    for index, step, readings in steps:
        for reading in readings:
            origins = [reader.of(partition) for partition in reading.partitions]
            parts.append(segments_of(reading, origins))
            size = len(origins)
            batches.append(np.full(size, index * stride + step))
            ranks.append(np.full(size, (index * config.num_ranks + reading.rank) * stride + step))
    files, speakers, positions, values = (
        np.concatenate(column) for column in zip(*parts, strict=True)
    )
    samples = Samples(np.concatenate(batches), files, speakers, positions, values)
    return samples, np.concatenate(ranks)


def segments_of(reading: Reading, origins: Sequence[Origins]) -> tuple[np.ndarray, ...]:
    """File, speaker, position and value of each piece of one minibatch."""
    rows = [(each, row) for each, row in zip(origins, reading.rows.tolist(), strict=True)]
    places = np.array([each.places[row] for each, row in rows])
    return (
        np.array([each.files[row] for each, row in rows]),
        np.array([each.speakers[row] for each, row in rows]),
        places << START_BITS | reading.starts,
        np.array([each.values[row] for each, row in rows]),
    )


def finite(value: float) -> float | None:
    """A number that JSON can hold: None for what is not defined."""
    return value if math.isfinite(value) else None


def finite_figure(figure: Figure) -> dict[str, float | None]:
    """A figure for JSON."""
    return {name: finite(value) for name, value in asdict(figure).items()}
