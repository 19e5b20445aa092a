"""Open a job, record that it has begun, and compare its recipe with stored work.

Opening parses the arguments, reads the recipe and the cluster file, and confines the store to
their prefixes. The record of a start holds its time, its recipe and the hours that were read
before: a later start names the settings that differ, and `status` computes the rate.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from infra.cluster import Cluster, load_cluster
from infra.log_lines import log
from infra.settings import ConfigurationError, canonical_json, holds_password, printable, shown
from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri, normalize_uri
from infra.task_metrics import TaskTotals
from infra.torchrun import launched_rank
from jobs.cli.arguments import (
    Parser,
    add_log_argument,
    add_recipe_arguments,
    recipe_path,
    toml_path,
)
from jobs.run_table import STEPS, Written, step_configs, written, written_steps
from pipeline.records import Tally
from pipeline.runs.commit import commit_uris, each_commit
from pipeline.runs.increment import BaseStep, chain_of, read_bases, require_beside
from pipeline.runs.manifest import Manifest, changes, is_finished, manifest_uri, read_manifest
from pipeline.runs.names import (
    ALIGNMENTS_FOLDER,
    CHECKPOINTS_FOLDER,
    COMMAND_LINE_SETTINGS,
    CORPUS_FOLDER,
    DEV,
    EVALUATION_STEP,
    MODELS_FOLDER,
    SCRATCH_FOLDER,
    SELECTED_PREFIX,
    SELECTION_FOLDER,
    STEP_RECORDS_FOLDER,
    TARGETS_FOLDER,
    UNLABELLED,
    features_step,
    folder_of,
    model_step,
    selection_step,
    start_record,
)
from pipeline.runs.sealed_json import read_sealed, seal, typed_value
from pipeline.settings import MAY_DIFFER
from training.data.sub_epochs import newest_place, trained_share
from training.fit.model_specs import Fit
from training.settings.recipe import Recipe, read_recipe


@dataclass(frozen=True)
class Job:
    """Job holds the recipe, the run and the store of one invocation.

    Among ranks only the leader prints the answer and stores the summary.
    """

    name: str
    recipe: Recipe
    run_uri: str
    corpus_uri: str
    store: ObjectStore
    cluster: Cluster
    arguments: argparse.Namespace
    is_leader: bool
    tasks: TaskTotals = field(default_factory=TaskTotals)
    pace: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    bases: tuple[str, ...] = ()

    def has(self, step: str) -> bool:
        """Return whether the run has the manifest of a step."""
        return is_finished(self.store, self.run_uri, step)

    def manifest(self, step: str) -> Manifest:
        """Read the manifest of a finished step of the run."""
        return read_manifest(self.store, self.run_uri, step)

    def take_pace(self, model: str, pace: Sequence[Any]) -> None:
        """Keep the pace of a model's sub-epochs for the job's record."""
        self.pace[model] = [asdict(each) for each in pace]


def written_manifests(recipe: Recipe, name: str, run_uri: str) -> list[str]:
    """Return the manifests that a run has once the job `name` is done, whatever its speakers."""
    written = STEPS[name].writes(recipe)
    return [manifest_uri(run_uri, each.name) for each in written if not each.is_optional]


def job_parser(name: str, description: str, exit_codes: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that every step and every query takes."""
    parser = Parser(
        prog=f"megahour {name}", description=description, epilog=f"Exit codes: {exit_codes}"
    )
    add_recipe_arguments(parser)
    add = parser.add_argument
    add("--run", required=True, help="folder or s3:// URI that holds the run")
    add("--cluster", help="cluster TOML, or a name in infra/clusters; default: the recipe's")
    add("--json", action="store_true", help="print one JSON object on standard output")
    add_log_argument(parser)
    return parser


def open_job(name: str, arguments: argparse.Namespace) -> Job:
    """Read the recipe and confine the store to the prefixes that the job's cluster may use."""
    is_leader = launched_rank() == 0
    say = partial(log, step=name) if is_leader else lambda _: None
    recipe = read_recipe(recipe_path(arguments.recipe), arguments.set, arguments.trainers, say)
    run_uri = normalize_uri(arguments.run)
    if holds_password(run_uri):
        need = "need one without: credentials come from the environment, a profile or a role"
        raise ConfigurationError(f"--run {printable(run_uri)}: a password or a signature: {need}")
    corpus_uri = normalize_uri(recipe.corpus.uri or join_uri(run_uri, CORPUS_FOLDER))
    cluster = load_cluster(toml_path(arguments.cluster or recipe.cluster or name))
    bases = _bases(recipe, run_uri, getattr(arguments, "extends", ""))
    # A step may read of the runs that it extends what it may read of its own.
    runs = (run_uri, *bases)
    prefixes = [each for run in runs for each in cluster.readable(run, corpus_uri)]
    store = ObjectStore((*prefixes, *recipe.corpus.audio_prefixes))
    return Job(
        name,
        recipe,
        run_uri,
        corpus_uri,
        store,
        cluster,
        arguments,
        is_leader=is_leader,
        bases=bases,
    )


def _bases(recipe: Recipe, run_uri: str, extends: str) -> tuple[str, ...]:
    """Return the runs that a run extends, as it is recorded or as the command line asks for.

    Raises ConfigurationError for a recipe or a base that no increment can have.
    """
    runs = [run_uri, *([normalize_uri(extends)] if extends else [])]
    try:
        if extends:
            require_beside(*runs)
        records = ObjectStore(tuple(join_uri(run, STEP_RECORDS_FOLDER) for run in runs))
        found = chain_of(records, *runs) if extends else read_bases(records, run_uri)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if found:
        require_extendable(recipe)
    return found


def require_extendable(recipe: Recipe) -> None:
    """Raise ConfigurationError for a recipe by which no run can extend another."""
    if not recipe.corpus.uri:
        raise ConfigurationError(
            "corpus: uri = '': an increment needs the corpus that its base has read: set the "
            "folder in both recipes, outside of any run"
        )
    if recipe.targets.rounds > 1:
        raise ConfigurationError(
            f"targets: rounds = {recipe.targets.rounds}: need 1 in an increment: the teacher of a "
            "later round would have to learn from all targets again"
        )


SAMPLED_COMMITS = 100


def begin(job: Job, steps: Sequence[Written]) -> None:
    """Store the time of this start, the hours read before it, and the recipe of the first one.

    Another recipe's work is there to be compared.
    """
    resumes = _has_work(job, [step.name for step in steps])
    before = read_start_record(job, job.name) if resumes else None
    document = {
        "step": job.name,
        "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hours_before": {step.name: hours_read(job, step) for step in steps} if resumes else {},
        "recipe": before["recipe"] if before else json.loads(canonical_json(job.recipe)),
    }
    job.store.put(join_uri(job.run_uri, start_record(job.name)), seal(document, indent=1))


def end(job: Job) -> None:
    """Remove what `begin` stored: the job's record and manifests say all."""
    job.store.delete(join_uri(job.run_uri, start_record(job.name)))


def remove_start_record(job: Job, steps: Sequence[str]) -> None:
    """Remove what `begin` stored where the job was refused before its first task."""
    if not _has_work(job, steps):
        end(job)


def read_start_record(job: Job, name: str) -> dict[str, Any] | None:
    """Read what the job `name` stored as it began; None if it did not, or has ended."""
    with suppress(ObjectNotFound, ValueError):
        return parse_start_record(job.store.get(join_uri(job.run_uri, start_record(name))))
    return None


def parse_start_record(data: bytes) -> dict[str, Any]:
    """Read what a job stored as it began; ValueError for other fields than `begin` writes."""

    def parse(record: dict[str, Any]) -> dict[str, Any]:
        typed_value(record, "recipe", dict[str, Any])
        require_from_zero(typed_value(record, "hours_before", dict[str, float]))
        require_time(record, "started_at")
        return record

    return read_sealed(data, "run the step again", parse)


def require_time(record: Mapping[str, Any], name: str) -> None:
    """Raise TypeError for a field that is no time in ISO 8601 with an offset."""
    text = typed_value(record, name, str)
    with suppress(ValueError):
        if datetime.fromisoformat(text).tzinfo is not None:
            return
    raise TypeError(f"{name} = {shown(text)}: need ISO 8601 with an offset")


def require_from_zero(table: Mapping[str, Any]) -> None:
    """Raise TypeError for a number below 0, or of more than 63 bits."""
    for name, value in table.items():
        if isinstance(value, int | float) and not 0 <= value < 2**63:
            raise TypeError(f"{name} = {shown(value)}: need a number from 0")


def hours_read(job: Job, step: Written) -> float:
    """Return the hours of speech that a step has read so far, of a training its share of them.

    Of more than `SAMPLED_COMMITS` commits it is an estimate, by every n-th: 200,000 small objects
    would keep a start waiting for minutes.
    """
    if job.has(step.name):
        return job.manifest(step.name).tally_in.hours
    if step.fit is not None:
        return training_hours(job, step.fit)[0]
    uris = reading_commits(job, step.name)
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
    return [each for each in uris if each.rpartition("/")[2].startswith(SELECTED_PREFIX)]


def training_hours(job: Job, fit: Fit) -> tuple[float, float]:
    """Return the hours of a training's data that its newest checkpoint is worth, and all of them.

    All hours are 0 where the data are not there yet.
    """
    data = (fit.labelled, *([fit.unlabelled] if fit.unlabelled else []))
    if not all(job.has(step) for step in data):
        return 0.0, 0.0
    hours = [job.manifest(step).tally_out.hours for step in data]
    labelled, unlabelled = (*hours, 0.0)[:2]
    checkpoints = join_uri(job.run_uri, model_step(fit.name), CHECKPOINTS_FOLDER)
    place = newest_place(job.store, checkpoints)
    share = trained_share(fit.sub_epochs, place.sub_epoch, place.share, labelled, unlabelled)
    return share * sum(hours), sum(hours)


def changes_since_start(job: Job) -> list[str]:
    """Name the settings in which the recipe differs from that of the work that has begun."""
    before = read_start_record(job, job.name)
    if before is None:
        return []
    return changes(before["recipe"], json.loads(canonical_json(job.recipe)))


def conflicts(job: Job, steps: Sequence[str]) -> Mapping[str, list[str]]:
    """Name by step the settings in which what is stored differs from the recipe.

    A finished step's are in its manifest. One that has only begun is compared by whole recipes.
    """
    has_dev = job.has(features_step(DEV))
    now = step_configs(job.recipe, job.recipe, has_dev)
    found = {}
    for step in steps:
        if job.has(step):
            config = job.manifest(step).config
            before = {
                name: each for name, each in config.items() if name not in COMMAND_LINE_SETTINGS
            }
            found[step] = changes(before, now[step]) if before and step in now else []
        elif _has_work(job, [step]):
            found[step] = changes_since_start(job)
    return {step: named for step, named in found.items() if named}


def require_base(jobs: Sequence[Job]) -> None:
    """Raise ConfigurationError if the base of an increment is unfinished, or of another recipe.

    A base has all that its increment reads, unless it has features alone.
    """
    if not jobs[0].bases:
        return
    recipe, base = jobs[0].recipe, jobs[0].bases[0]
    stores = {step: job.store for job in jobs for step in written_steps(recipe, job.name)}
    there = {step for step, store in stores.items() if is_finished(store, base, step)}
    of_base = {name: e for name, e in written(recipe).items() if e.in_increment != "made"}
    needed = [name for name, each in of_base.items() if not each.is_optional]
    of_training = (ALIGNMENTS_FOLDER, MODELS_FOLDER, TARGETS_FOLDER)
    if not any(folder_of(step) in of_training for step in there):
        needed = [selection_step(UNLABELLED), features_step(UNLABELLED)]
    if missing := [step for step in needed if step not in there]:
        raise ConfigurationError(
            f"{base} is unfinished: it has no manifest of {', '.join(missing)}: finish "
            "it, or extend another run"
        )
    now = step_configs(recipe, recipe, features_step(DEV) in there)
    for step in sorted(there & now.keys() & of_base.keys()):
        manifest = read_manifest(stores[step], base, step)
        may_differ = MAY_DIFFER if step == selection_step(UNLABELLED) else ()
        try:
            BaseStep(base, manifest, "").require_same(now[step], may_differ)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error


def _has_work(job: Job, steps: Sequence[str]) -> bool:
    """Return whether tasks or checkpoints of these steps are stored."""
    return any(job.store.list(join_uri(job.run_uri, step)) for step in steps)
