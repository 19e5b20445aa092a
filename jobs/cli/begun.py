"""Say that a job has begun, with its recipe, so that a later start can name what differs."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from infra.configuration import canonical_json
from infra.store.object_store import ObjectNotFound, join_uri
from jobs.cli.job import Job
from pipeline.runs.job_records import parse_begun_record
from pipeline.runs.manifest import changes, is_finished, read_manifest
from pipeline.runs.names import CERTIFICATE_STEP, DEV, begun_record, features_step
from pipeline.runs.sealed_json import seal
from training.fit.step_settings import step_configs


def begin(job: Job, steps: Sequence[str]) -> None:
    """Store the recipe and the time, unless another recipe's work is there to be compared."""
    before = begun(job, job.name)
    if before is not None and _has_work(job, steps):
        return
    document = {
        "step": job.name,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "recipe": json.loads(canonical_json(job.recipe)),
    }
    job.store.put(join_uri(job.run_uri, begun_record(job.name)), seal(document, indent=1))


def end(job: Job) -> None:
    """Remove what `begin` stored: the job's record and manifests say all."""
    job.store.delete(join_uri(job.run_uri, begun_record(job.name)))


def withdraw(job: Job, steps: Sequence[str]) -> None:
    """Remove what `begin` stored where the job was refused before its first task."""
    if not _has_work(job, steps):
        end(job)


def begun(job: Job, name: str) -> dict[str, Any] | None:
    """Read what the job `name` stored as it began; None if it did not, or has ended."""
    with suppress(ObjectNotFound, ValueError):
        return parse_begun_record(job.store.get(join_uri(job.run_uri, begun_record(name))), "")
    return None


def begun_changes(job: Job) -> list[str]:
    """Name the settings in which the recipe differs from that of the work that has begun."""
    before = begun(job, job.name)
    if before is None:
        return []
    return changes(before["recipe"], json.loads(canonical_json(job.recipe)))


def conflicts(job: Job, steps: Sequence[str]) -> Mapping[str, list[str]]:
    """Name by step the settings in which what is stored differs from the recipe.

    A finished step's are in its manifest. One that has only begun is compared by whole recipes.
    """
    has_dev = is_finished(job.store, job.run_uri, features_step(DEV))
    now = step_configs(job.recipe, job.recipe, has_dev)
    found = {}
    for step in steps:
        if is_finished(job.store, job.run_uri, step):
            before = read_manifest(job.store, job.run_uri, step).config
            if step == CERTIFICATE_STEP:  # its own options are beside the recipe's settings
                before = {name: before.get(name) for name in now[step]}
            found[step] = changes(before, now[step]) if before and step in now else []
        elif _has_work(job, [step]):
            found[step] = begun_changes(job)
    return {step: named for step, named in found.items() if named}


def _has_work(job: Job, steps: Sequence[str]) -> bool:
    """Return whether tasks or checkpoints of these steps are stored."""
    return any(job.store.list(join_uri(job.run_uri, step)) for step in steps)
