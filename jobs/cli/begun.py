"""Say that a job has begun, with its recipe, so that a later start can name what differs."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from infra.configuration import ConfigurationError, canonical_json
from infra.store.object_store import ObjectNotFound, join_uri
from jobs.cli.job import Job, written_steps
from pipeline.audit.job_records import parse_begun_record
from pipeline.runs.increment import BaseStep, is_of_base
from pipeline.runs.manifest import changes, is_finished, read_manifest
from pipeline.runs.names import (
    ALIGNMENTS_FOLDER,
    CERTIFICATE_STEP,
    DEV,
    MODELS_FOLDER,
    OPTIONAL_STEPS,
    TARGETS_FOLDER,
    UNLABELLED,
    begun_record,
    features_step,
    folder_of,
    selection_step,
)
from pipeline.runs.sealed_json import seal
from pipeline.steps.increments.new_metadata import MAY_DIFFER
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


def require_base(jobs: Sequence[Job]) -> None:
    """Raise ConfigurationError if the base of an increment is unfinished, or of another recipe.

    A base has all that its increment reads, unless it has features alone.
    """
    increment = jobs[0].increment
    if increment is None:
        return
    by_step = {step: job for job in jobs for step in written_steps(job.recipe, job.name)}
    there = {step for step, job in by_step.items() if is_finished(job.store, increment.base, step)}
    needed = [step for step in by_step if step not in OPTIONAL_STEPS and is_of_base(step)]
    of_training = (ALIGNMENTS_FOLDER, MODELS_FOLDER, TARGETS_FOLDER)
    if not any(folder_of(step) in of_training for step in there):
        needed = [selection_step(UNLABELLED), features_step(UNLABELLED)]
    if missing := [step for step in needed if step not in there]:
        raise ConfigurationError(
            f"{increment.base} is unfinished: it has no manifest of {', '.join(missing)}: finish "
            "it, or extend another run"
        )
    now = step_configs(jobs[0].recipe, jobs[0].recipe, features_step(DEV) in there)
    for step in sorted(there & now.keys()):
        if is_of_base(step):
            manifest = read_manifest(by_step[step].store, increment.base, step)
            may_differ = MAY_DIFFER if step == selection_step(UNLABELLED) else ()
            try:
                BaseStep(increment.base, manifest, "").require_same(now[step], may_differ)
            except ValueError as error:
                raise ConfigurationError(str(error)) from error


def _has_work(job: Job, steps: Sequence[str]) -> bool:
    """Return whether tasks or checkpoints of these steps are stored."""
    return any(job.store.list(join_uri(job.run_uri, step)) for step in steps)
