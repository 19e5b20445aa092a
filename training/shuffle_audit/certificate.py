"""Certify how uniform the order is in which a run's student reads (003 IV-A2).

The certificate covers the first steps of the first unlabelled sub-epochs, of chunks and of whole
utterances. It reads ids only. A step's minibatch is that of all ranks together, over which
synchronous trainers sum gradients. A rank's minibatch drives its model between the exchanges of
BMUF and HTM.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np

from infra.settings import Range, check_ranges
from infra.store.object_store import ObjectStore, join_uri
from pipeline.audit.provenance import STEPS, read_provenance
from pipeline.runs.commit import StepContext
from pipeline.runs.manifest import Output, read_manifest, sha256, store_again
from pipeline.runs.names import CERTIFICATE_DOCUMENT, CERTIFICATE_STEP, PARTITIONS_STEP
from pipeline.runs.step import StepContents, StepResult, StepSpec, run_step
from pipeline.shuffle_quality import (
    Figure,
    certify,
    expected_effective_number,
    intra_group_correlation,
)
from training.data.row_order import RowOrder
from training.data.sub_epochs import SubEpoch, check_offsets
from training.fit.model_specs import Fit
from training.shuffle_audit.order_samples import TrainingStep, collect_samples, read_steps
from training.shuffle_audit.row_provenance import ProvenanceReader

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

    def certify_partitions(_: StepContext) -> StepContents:
        partitions = read_manifest(store, run_uri, PARTITIONS_STEP)
        check_offsets(fit.sub_epochs, partitions)
        order = RowOrder(
            store=store,
            run_uri=run_uri,
            labelled=(),
            unlabelled=tuple(partitions.outputs),
            delay=fit.model.delay,
            minibatch_frames=fit.loop.minibatch_frames,
            seed=fit.seed,
            rank=0,
            world_size=config.num_ranks,
            augmentation=fit.augmentation,
        )
        document = {**asdict(config), **certificate(order, fit.sub_epochs, config)}
        data, tally = _to_bytes(document), partitions.tally_out
        counts = (tally.utterances, tally.duration_ms)
        output = Output(CERTIFICATE_DOCUMENT, len(data), sha256(data), *counts)
        return StepContents.of_all(tally, (output,), document)

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
        raise ValueError("no sub-epoch has two steps: lower student.minibatch_frames, or --ranks")
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
    by_rank = certify(samples.in_batches(rank_batches), seed)
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
        "step": {name: figure_document(figure) for name, figure in by_step.items()},
        "rank": {name: figure_document(figure) for name, figure in by_rank.items()},
    }


def figure_document(figure: Figure) -> dict[str, float | None]:
    """Convert a figure to numbers that JSON can hold."""
    return {name: finite_or_none(value) for name, value in asdict(figure).items()}


def finite_or_none(value: float) -> float | None:
    """Return a number that JSON can hold: None if it is not finite."""
    return value if math.isfinite(value) else None
