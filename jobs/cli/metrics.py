"""Write a job's metrics as a file that Prometheus's textfile collector reads."""

import os
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from infra.settings import printable

Samples = list[tuple[dict[str, str], float]]


def metrics_text(summary: Mapping[str, Any], finished_at: float) -> str:
    """Return a finished job's metrics in Prometheus's text format; times are Unix seconds."""
    return "".join(_families(summary, finished_at))


def write_metrics(path: Path, text: str) -> None:
    """Replace the file in one rename: the collector reads a whole file or the one before."""
    # Its name does not end in .prom, which the collector would read.
    partial = path.with_name(f".partial-{uuid.uuid4().hex}")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _families(summary: Mapping[str, Any], finished_at: float) -> Iterator[str]:
    job = {"job_step": str(summary["step"])}
    yield _gauge("job_last_success_timestamp_seconds", "When the job ended.", [(job, finished_at)])
    yield _gauge("job_duration_seconds", "Wall-clock time.", [(job, summary["seconds"])])
    yield _gauge(
        "job_task_seconds", "Time of all tasks together.", [(job, summary["task_seconds"])]
    )
    requests = summary["requests"]
    kinds = ("get", "put", "head", "list", "retries")
    sent = [({**job, "kind": kind}, requests[kind]) for kind in kinds]
    yield _gauge("job_store_requests", "Requests to the store by kind, retries among them.", sent)
    ways = {"received": requests["bytes_received"], "sent": requests["bytes_sent"]}
    moved = [({**job, "direction": way}, number) for way, number in ways.items()]
    yield _gauge("job_store_bytes", "Bytes of requests' bodies.", moved)
    faults = [(job, float(len(summary["device_faults"])))]
    yield _gauge("job_device_faults", "Faults of devices while tasks used them.", faults)
    counts = {
        "utterances_in": ("step_utterances_in", "Utterances that a step read.", 1),
        "utterances_out": ("step_utterances_out", "Utterances that a step made.", 1),
        "quarantined": ("step_utterances_quarantined", "Utterances in the step's ledger.", 1),
        "hours_in": ("step_audio_in_seconds", "Audio that a step read.", 3600),
        "hours_out": ("step_audio_out_seconds", "Audio that a step made.", 3600),
        "hours_quarantined": ("step_audio_quarantined_seconds", "Audio in the ledger.", 3600),
    }
    for key, (name, text, factor) in counts.items():
        samples = [
            ({**job, "step": step}, tally[key] * factor)
            for step, tally in summary["manifests"].items()
        ]
        yield _gauge(name, text, samples)


def _gauge(name: str, text: str, samples: Samples) -> str:
    full = f"megahour_{name}"
    lines = [f"# HELP {full} {text}", f"# TYPE {full} gauge"]
    lines += [f"{full}{{{_labels(labels)}}} {float(value)!r}" for labels, value in samples]
    return "\n".join(lines) + "\n" if samples else ""


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def metrics_path(given: str) -> Path:
    """Return the path of --metrics-file; ValueError if no file can be written there."""
    path = Path(given)
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        need = "need a file in a folder that can be written"
        raise ValueError(f"--metrics-file {printable(given)}: {need}")
    return path
