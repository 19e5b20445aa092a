"""Say that a job has begun: with its recipe, so that a later start can name what differs.

Each start also stores its time and the hours that were read before, from which status has the rate.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from infra.settings import ConfigurationError, canonical_json
from infra.store.object_store import ObjectNotFound, join_uri
from jobs.cli.job import Job, written_steps
from pipeline.audit.job_records import parse_begun_record
from pipeline.records import Tally
from pipeline.runs.commit import commit_uris, each_commit
from pipeline.runs.increment import BaseStep, is_of_base
from pipeline.runs.manifest import changes, is_finished, read_manifest
from pipeline.runs.names import (
    ALIGNMENTS_FOLDER,
    CERTIFICATE_STEP,
    CHECKPOINTS_FOLDER,
    DEV,
    EVALUATION_STEP,
    MODELS_FOLDER,
    OPTIONAL_STEPS,
    SCRATCH_FOLDER,
    SELECTION_FOLDER,
    TARGETS_FOLDER,
    UNLABELLED,
    begun_record,
    features_step,
    folder_of,
    model_step,
    realignment_rounds,
    selection_step,
)
from pipeline.runs.sealed_json import seal
from pipeline.steps.selection.increment import MAY_DIFFER
from pipeline.steps.selection.select import SELECTED
from training.checkpoints.place import newest_place
from training.data.sub_epochs import trained_share
from training.fit.model_specs import Fit, aligner_fit, fits_of, sequence_fit, step_configs
from training.settings.recipe import Recipe

SAMPLED_COMMITS = 100


def begin(job: Job, steps: Sequence[str]) -> None:
    """Store the time of this start, the hours read before it, and the recipe of the first one.

    Another recipe's work is there to be compared.
    """
    resumes = _has_work(job, steps)
    before = begun(job, job.name) if resumes else None
    document = {
        "step": job.name,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hours_before": {step: hours_read(job, step) for step in steps} if resumes else {},
        "recipe": before["recipe"] if before else json.loads(canonical_json(job.recipe)),
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


def hours_read(job: Job, step: str) -> float:
    """Return the hours of speech that a step has read so far, of a training its share of them.

    Of more than `SAMPLED_COMMITS` commits it is an estimate, by every n-th: 200,000 small objects
    would keep a start waiting for minutes.
    """
    if is_finished(job.store, job.run_uri, step):
        return read_manifest(job.store, job.run_uri, step).tally_in.hours
    if (fit := fit_of(job.recipe, step)) is not None:
        return training_hours(job, fit)[0]
    uris = reading_commits(job, step)
    sampled = uris[:: -(-len(uris) // SAMPLED_COMMITS) or 1]
    read = sum((each.tally_in for each in each_commit(job.store, sampled)), Tally())
    return read.hours * len(uris) / max(1, len(sampled))


def reading_commits(job: Job, step: str) -> list[str]:
    """List the commits whose tasks read the step's input, once each; evaluation's once a model."""
    folder = step
    if folder_of(step) == SELECTION_FOLDER or step == EVALUATION_STEP:
        folder = join_uri(step, SCRATCH_FOLDER)
    uris = commit_uris(job.store, job.run_uri, folder)
    if folder_of(step) != SELECTION_FOLDER:
        return uris
    # A selection also indexes its buckets, and packs what it has selected.
    return [each for each in uris if each.rpartition("/")[2].startswith(SELECTED)]


def fit_of(recipe: Recipe, step: str) -> Fit | None:
    """Return the training that a step is; None if it is none."""
    aligners = (aligner_fit(recipe, each) for each in realignment_rounds(recipe.alignment.rounds))
    fits = [*aligners, *fits_of(recipe)]
    by_sequence = [sequence_fit(recipe, fit) for fit in fits]
    return {model_step(fit.name): fit for fit in (*by_sequence, *fits)}.get(step)


def training_hours(job: Job, fit: Fit) -> tuple[float, float]:
    """Return the hours of a training's data that its newest checkpoint is worth, and all of them.

    All hours are 0 where the data are not there yet.
    """
    data = (fit.labelled, *([fit.unlabelled] if fit.unlabelled else []))
    if not all(is_finished(job.store, job.run_uri, step) for step in data):
        return 0.0, 0.0
    hours = [read_manifest(job.store, job.run_uri, step).tally_out.hours for step in data]
    labelled, unlabelled = (*hours, 0.0)[:2]
    checkpoints = join_uri(job.run_uri, model_step(fit.name), CHECKPOINTS_FOLDER)
    place = newest_place(job.store, checkpoints)
    share = trained_share(fit.sub_epochs, place.sub_epoch, place.share, labelled, unlabelled)
    return share * sum(hours), sum(hours)


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
