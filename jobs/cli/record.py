"""Summarize a finished step: as lines, as the record that the report reads, as metrics.

The metrics are a file for the textfile collector of Prometheus.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict, get_type_hints

from infra.host_folder import replacing
from infra.settings import ConfigurationError, canonical_json, digest, printable
from infra.store.object_store import ObjectNotFound, join_uri
from infra.task_metrics import REQUEST_KINDS, DeviceFault, RequestCounts
from jobs.cli.host import describe_commit, describe_machine
from jobs.cli.job import Job, conflicts, require_from_zero, require_time
from jobs.run_table import optional_steps
from pipeline.runs.manifest import Manifest, listed, manifest_uri
from pipeline.runs.names import CHECKPOINTS_FOLDER, MODELS_FOLDER, folder_of, job_record
from pipeline.runs.sealed_json import (
    NamedObject,
    named_objects,
    naming,
    read_sealed,
    seal,
    typed_value,
)


def dry_run_summary(job: Job, reads: tuple[str, ...], writes: tuple[str, ...]) -> dict[str, Any]:
    """Say of each manifest that the step reads or writes whether it exists."""

    def state(name: str) -> str:
        return "there" if job.has(name) else "missing"

    return {
        "step": job.name,
        "status": "dry run",
        "run": job.run_uri,
        "recipe_digest": digest(job.recipe),
        "reads": {name: state(name) for name in there_or_needed(job, reads)},
        "writes": {name: state(name) for name in there_or_needed(job, writes)},
        "conflicts": conflicts(job, writes),
    }


def there_or_needed(job: Job, steps: Sequence[str]) -> list[str]:
    """Leave out the optional steps that the run does not have."""
    optional = optional_steps(job.recipe)
    return [s for s in steps if s not in optional or job.has(s)]


def describe_dry_run(summary: dict[str, Any]) -> str:
    """Format the summary of a dry run as lines for people."""
    lines = [f"{summary['step']}: dry run on {summary['run']}"]
    for verb in ("reads", "writes"):
        lines += [f"  {verb} {name}: {state}" for name, state in summary[verb].items()]
    for name, changed in summary["conflicts"].items():
        remedy = f"use another --run, or remove {name}"
        lines.append(f"  {name} is of another recipe{listed(changed)}: {remedy}")
    return "\n".join(lines)


def describe(summary: dict[str, Any]) -> str:
    """Format the summary of a step as lines for people."""
    requests = RequestCounts(**summary["requests"])
    lines = [
        f"{summary['step']}: {summary['status']} ({summary['seconds']:.1f} s, "
        f"{requests.num_requests:,} requests, {requests.retries:,} retried)"
    ]
    lines += [
        f"  {name}: {counts['utterances_out']} utterances, {counts['hours_out']:.2f} h"
        + (f", {counts['quarantined']} quarantined" if counts["quarantined"] else "")
        for name, counts in summary["manifests"].items()
    ]
    lines += [f"  {DeviceFault(**each)}" for each in summary["device_faults"]]
    return "\n".join(lines)


def tallies(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest's counts and hours."""
    return {
        "utterances_in": manifest.tally_in.utterances,
        "utterances_out": manifest.tally_out.utterances,
        "quarantined": manifest.quarantined.utterances,
        "hours_in": round(manifest.tally_in.hours, 4),
        "hours_out": round(manifest.tally_out.hours, 4),
        "hours_quarantined": round(manifest.quarantined.hours, 4),
    }


def store_record(job: Job, summary: dict[str, Any], steps: Sequence[str], is_fresh: bool) -> None:
    """Store the summary, the resolved recipe and the names of what was made as the job's record.

    The record of the last job that did work replaces earlier ones, and adds up what earlier rounds
    took, whose manifests stand. A job that found all done stores a record where none is whole, and
    else corrects the names.
    """
    uri = join_uri(job.run_uri, job_record(job.name))
    made, before = _made(job, steps), read_job_record(job, job.name)
    if before is not None and not is_fresh:
        if named_objects(before) != made:
            job.store.put(uri, seal(naming(before, made), indent=1))
        return
    record = {
        **summary,
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "pace": job.pace,
        "machine": describe_machine(),
        "commit": describe_commit(),
        "cluster": {
            "instance_type": job.cluster.instance_type,
            "num_instances": job.cluster.num_instances,
            "price_per_instance_hour": job.cluster.price_per_instance_hour,
        },
        "recipe_digest": digest(job.recipe),
        "recipe": json.loads(canonical_json(job.recipe)),
        "trainers": job.arguments.trainers,
    }
    if before is not None and {*named_objects(before)} <= {*made}:
        record |= _with_earlier(before, record)
    job.store.put(uri, seal(naming(record, made), indent=1))


def _with_earlier(before: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
    requests = {
        kind: number + before["requests"].get(kind, 0)
        for kind, number in record["requests"].items()
    }
    seconds = {name: round(record[name] + before[name], 2) for name in ("seconds", "task_seconds")}
    return {
        **seconds,
        "requests": requests,
        "pace": {**before["pace"], **record["pace"]},
        "device_faults": [*before["device_faults"], *record["device_faults"]],
    }


def _made(job: Job, steps: Sequence[str]) -> tuple[NamedObject, ...]:
    """Name the manifests of the steps, and the checkpoints' records, which no manifest names.

    A later round of targets may not be made yet.
    """
    there = [step for step in steps if job.has(step)]
    uris = [manifest_uri(job.run_uri, step) for step in there]
    for step in steps:
        if folder_of(step) == MODELS_FOLDER:
            listed = job.store.list(join_uri(job.run_uri, step, CHECKPOINTS_FOLDER))
            uris += [found.uri for found in listed if found.uri.endswith(".json")]
    base = f"{job.run_uri}/"
    return tuple(NamedObject.of(uri.removeprefix(base), job.store.get(uri)) for uri in uris)


def read_job_record(job: Job, name: str) -> dict[str, Any] | None:
    """Read the record of the job `name`; None if there is none, or if it is damaged."""
    with suppress(ObjectNotFound, ValueError):
        return parse_job_record(job.store.get(join_uri(job.run_uri, job_record(name))), "")
    return None


class _Counts(TypedDict):
    utterances_in: int
    utterances_out: int
    quarantined: int


class _Requests(TypedDict):
    get: int
    put: int
    head: int
    list: int


class _Cluster(TypedDict):
    num_instances: int
    price_per_instance_hour: float


class _JobRecord(TypedDict):
    """The fields of a job's record that others read; a step's dollars are computed from some."""

    step: str
    machine: str
    commit: str
    finished_at: str
    seconds: float
    task_seconds: float
    recipe: dict[str, Any]
    pace: dict[str, Any]
    trainers: dict[str, Any]
    manifests: dict[str, _Counts]
    requests: _Requests
    cluster: _Cluster
    device_faults: list[dict[str, Any]]


def parse_job_record(data: bytes, remedy: str) -> dict[str, Any]:
    """Read the record of a job that has ended; ValueError for other fields."""

    def parse(record: dict[str, Any]) -> dict[str, Any]:
        for name, kind in get_type_hints(_JobRecord).items():
            typed_value(record, name, kind)
        for table in (record, record["cluster"]):  # counts are from 0 by their type
            require_from_zero(table)
        require_time(record, "finished_at")
        return record

    return read_sealed(data, remedy, parse)


_TALLIES = (
    ("utterances_in", "step_utterances_in", "Utterances that a step read.", 1),
    ("utterances_out", "step_utterances_out", "Utterances that a step made.", 1),
    ("quarantined", "step_utterances_quarantined", "Utterances in the step's ledger.", 1),
    ("hours_in", "step_audio_in_seconds", "Audio that a step read.", 3600),
    ("hours_out", "step_audio_out_seconds", "Audio that a step made.", 3600),
    ("hours_quarantined", "step_audio_quarantined_seconds", "Audio in the ledger.", 3600),
)
"""The metrics of a manifest's tallies: the tally, the metric, its help and its unit."""

_MEASURES = (
    ("cross_entropy", "model_cross_entropy_nats", "Loss a frame in the last sub-epoch."),
    ("frame_accuracy", "model_frame_accuracy_ratio", "Frames right in the last sub-epoch."),
)
"""The metrics of a trained model: the measure, in training and validation, and its help."""

_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def metrics_text(summary: Mapping[str, Any], finished_at: float) -> str:
    """Return a finished job's metrics in Prometheus's text format; times are Unix seconds."""
    job, requests = {"job_step": str(summary["step"])}, summary["requests"]
    sent = [({**job, "kind": kind}, requests[kind]) for kind in (*REQUEST_KINDS, "retries")]
    ways = {"received": requests["bytes_received"], "sent": requests["bytes_sent"]}
    moved = [({**job, "direction": way}, number) for way, number in ways.items()]
    num_faults = len(summary["device_faults"])
    gauges: list[tuple[str, str, list[tuple[dict[str, str], float]]]] = [
        ("job_last_success_timestamp_seconds", "When the job ended.", [(job, finished_at)]),
        ("job_duration_seconds", "Wall-clock time.", [(job, summary["seconds"])]),
        ("job_task_seconds", "Time of all tasks together.", [(job, summary["task_seconds"])]),
        ("job_store_requests", "Requests to the store by kind, retries among them.", sent),
        ("job_store_bytes", "Bytes of requests' bodies.", moved),
        ("job_device_faults", "Faults of devices while tasks used them.", [(job, num_faults)]),
    ]
    for key, name, text, factor in _TALLIES:
        tallied = summary["manifests"].items()
        counts = [({**job, "step": step}, tally[key] * factor) for step, tally in tallied]
        gauges.append((name, text, counts))
    for key, name, text in _MEASURES:
        measured = [
            ({**job, "step": step, "data": data}, measures[prefix + key])
            for step, measures in summary["measures"].items()
            for data, prefix in (("training", ""), ("validation", "validation_"))
            if prefix + key in measures
        ]
        gauges.append((name, text, measured))
    lines = []
    for name, text, samples in gauges:
        if samples:
            lines += [f"# HELP megahour_{name} {text}", f"# TYPE megahour_{name} gauge"]
        for labels, value in samples:
            written = (f'{label}="{of.translate(_ESCAPES)}"' for label, of in labels.items())
            lines.append(f"megahour_{name}{{{','.join(written)}}} {float(value)!r}")
    return "".join(f"{line}\n" for line in lines)


def write_metrics(path: Path, text: str) -> None:
    """Replace the file in one rename: the collector reads a whole file or the one before."""
    with replacing(path) as partial:  # not called .prom, which the collector would read
        partial.write_text(text, encoding="utf-8")


def metrics_path(given: str) -> Path:
    """Return the path of --metrics-file; ConfigurationError if no file can be written there."""
    path = Path(given)
    if path.is_dir() or not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        need = "need a file in a folder that can be written"
        raise ConfigurationError(f"--metrics-file {printable(given)}: {need}")
    return path
