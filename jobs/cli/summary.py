"""Summarize a step as JSON for the report, and as lines for people."""

import json
from datetime import UTC, datetime
from typing import Any

from infra.configuration import canonical_json, digest
from infra.store.object_store import join_uri
from infra.store.request_counts import RequestCounts
from jobs.cli.job import Job
from pipeline.runs.manifest import Manifest, manifest_uri
from pipeline.runs.names import STEP_RECORDS_FOLDER


def dry_run_summary(job: Job, reads: tuple[str, ...], writes: tuple[str, ...]) -> dict[str, Any]:
    """Say of each manifest that the step reads or writes whether it exists."""

    def state(name: str) -> str:
        return "there" if job.store.exists(manifest_uri(job.run_uri, name)) else "missing"

    return {
        "step": job.name,
        "status": "dry run",
        "run": job.run_uri,
        "recipe_digest": digest(job.recipe),
        "reads": {name: state(name) for name in reads},
        "writes": {name: state(name) for name in writes},
    }


def describe_dry_run(summary: dict[str, Any]) -> str:
    """Format the summary of a dry run as lines for people."""
    lines = [f"{summary['step']}: dry run on {summary['run']}"]
    for verb in ("reads", "writes"):
        lines += [f"  {verb} {name}: {state}" for name, state in summary[verb].items()]
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


def store_summary(job: Job, summary: dict[str, Any]) -> None:
    """Store the summary and the resolved recipe in <run>/steps, where the report finds them.

    The record of a step's last job replaces earlier ones; a job that found all done stores none.
    """
    record = {
        **summary,
        "finished_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe_digest": digest(job.recipe),
        "recipe": json.loads(canonical_json(job.recipe)),
    }
    uri = join_uri(job.run_uri, STEP_RECORDS_FOLDER, f"{job.name}.json")
    job.store.put(uri, (json.dumps(record, indent=1) + "\n").encode())
