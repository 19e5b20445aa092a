"""Open a job, record that it has begun, and compare its recipe with stored work.

Opening parses the arguments, reads the recipe and the cluster file, and confines the store to
their prefixes. The record of a start holds its time, its recipe and the hours that were read
before: a later start names the settings that differ, and `status` computes the rate.
"""

import argparse
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any

from infra.cluster import Cluster
from infra.log_lines import log
from infra.settings import ConfigurationError, canonical_json, holds_password, printable, shown
from infra.store.object_store import ObjectNotFound, ObjectStore, join_uri, normalize_uri
from infra.store.objects import PrefixError
from infra.store.uris import require_within, resolve_audio, resolve_prefix
from infra.task_metrics import TaskTotals
from infra.torchrun import launched_rank
from jobs.cli.arguments import (
    Parser,
    add_cluster_arguments,
    add_log_argument,
    add_recipe_arguments,
    cluster_of,
    recipe_path,
)
from jobs.run_table import (
    BUILD_GRAPH,
    EVALUATE,
    EXTRACT_FEATURES,
    REPORT,
    SELECT_UTTERANCES,
    STEPS,
    Written,
    step_configs,
    written,
    written_steps,
)
from pipeline.records import Tally
from pipeline.runs.commit import commit_uris, each_commit
from pipeline.runs.increment import (
    OPTIONS,
    Bases,
    BaseStep,
    Taken,
    bases_of,
    read_bases,
    record_bases,
    require_beside,
)
from pipeline.runs.manifest import (
    Manifest,
    changes,
    is_finished,
    read_manifest,
    read_with_digest,
    sha256,
    subsets_of_run,
)
from pipeline.runs.names import (
    ALIGNMENTS_FOLDER,
    COMMAND_LINE_SETTINGS,
    CORPUS_FOLDER,
    DEV,
    EVALUATION_STEP,
    EXTENDS,
    LABELLED,
    LABELLED_FROM,
    LANGUAGE_MODEL_SETTINGS,
    LEXICON_FILE,
    METADATA_FOLDER,
    MODELS_FOLDER,
    PHONES_PREFIX,
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
    bases: Bases = field(default_factory=Bases)

    def has(self, step: str) -> bool:
        """Return whether the run has the manifest of a step."""
        return is_finished(self.store, self.run_uri, step)

    @property
    def place(self) -> tuple[ObjectStore, str, str]:
        """Return the store, the run and the corpus, with which steps' functions begin."""
        return self.store, self.run_uri, self.corpus_uri

    @property
    def has_unlabelled(self) -> bool:
        """Return whether the run has features of unlabelled speech."""
        return self.has(features_step(UNLABELLED))

    @property
    def has_dev(self) -> bool:
        """Return whether the run has features of development speakers; ValueError for a part."""
        return DEV in subsets_of_run(self.store, self.run_uri)

    @property
    def evaluated_models(self) -> tuple[str, ...]:
        """Return the models that are scored: those of labelled speech where there is no other."""
        recipe = self.recipe
        return recipe.evaluated_models if self.has_unlabelled else recipe.supervised_models

    def manifest(self, step: str) -> Manifest:
        """Read the manifest of a finished step of the run."""
        return read_manifest(self.store, self.run_uri, step)

    def take_pace(self, model: str, pace: Sequence[Any]) -> None:
        """Keep the pace of a model's sub-epochs for the job's record."""
        self.pace[model] = [asdict(each) for each in pace]


def job_parser(name: str, description: str, exit_codes: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that every step and every query takes."""
    parser = Parser(
        prog=f"megahour {name}", description=description, epilog=f"Exit codes: {exit_codes}"
    )
    add_recipe_arguments(parser)
    add = parser.add_argument
    add("--run", required=True, help="folder or s3:// URI that holds the run")
    add_cluster_arguments(parser)
    add("--json", action="store_true", help="print one JSON object on standard output")
    add_log_argument(parser)
    return parser


def open_job(name: str, arguments: argparse.Namespace) -> Job:
    """Read the recipe, and make the job."""
    return job_of(name, recipe_of(name, arguments), arguments)


def recipe_of(name: str, arguments: argparse.Namespace) -> Recipe:
    """Read the recipe; the leader logs what --trainer makes of it."""
    say = partial(log, step=name) if launched_rank() == 0 else lambda _: None
    return read_recipe(recipe_path(arguments.recipe), arguments.set, arguments.trainers, say)


def job_of(name: str, recipe: Recipe, arguments: argparse.Namespace) -> Job:
    """Confine the store to the prefixes that the job's cluster may use."""
    is_leader = launched_rank() == 0
    run_uri = normalize_uri(arguments.run)
    if holds_password(run_uri):
        need = "need one without: credentials come from the environment, a profile or a role"
        raise ConfigurationError(f"--run {printable(run_uri)}: a password or a signature: {need}")
    corpus_uri = _corpus_uri(recipe, run_uri)
    cluster = cluster_of(name, arguments, recipe.cluster)
    if name in STEPS:
        require_prefixes(name, recipe, cluster, run_uri)
    bases = _bases(recipe, run_uri, arguments)
    # A step may read of the bases what it may read of its own run.
    runs = (run_uri, *bases.runs)
    prefixes = [each for run in runs for each in cluster.readable(run, corpus_uri)]
    store = ObjectStore((*prefixes, *recipe.corpus.audio_prefixes))
    return Job(name, recipe, run_uri, corpus_uri, store, cluster, arguments, is_leader, bases=bases)


def require_prefixes(step: str, recipe: Recipe, cluster: Cluster, run_uri: str) -> None:
    """Raise ConfigurationError for a cluster file without prefixes that the step needs.

    It writes its manifests' folders, with checkpoints, and its records. On other hosts, whose role
    permits what the file names, it also removes checkpoints and its start record.
    """
    row, corpus_uri = STEPS[step], _corpus_uri(recipe, run_uri)
    names = [(each.name, each.is_replaced) for each in row.writes(recipe)]
    folders = [STEP_RECORDS_FOLDER, *(name for name, _ in names)]
    removed = [start_record(step), *(name for name, is_replaced in names if is_replaced)]
    needs = {
        "write_prefixes": (cluster.writable(run_uri, corpus_uri), folders),
        "delete_prefixes": (cluster.deletable(run_uri, corpus_uri), removed),
    }
    if cluster.is_local:
        del needs["delete_prefixes"]
    for kind, (allowed, keys) in needs.items():
        uris = [join_uri(run_uri, key) for key in keys]
        if row.writes_corpus and keys is folders:
            uris.append(corpus_uri)
        prefixes = [resolve_prefix(each) for each in allowed]
        if lacks := [each for each in uris if _is_outside(each, prefixes)]:
            remedy = f"add them, or give another file by --step-cluster {step}=FILE"
            said = f"{step}: {kind} of its cluster file lack {', '.join(lacks)}"
            raise ConfigurationError(f"{said}: {remedy}")


def _is_outside(uri: str, prefixes: Sequence[str]) -> bool:
    try:
        require_within(uri, prefixes)
    except PrefixError:
        return True
    return False


def _corpus_uri(recipe: Recipe, run_uri: str) -> str:
    corpus_uri = normalize_uri(recipe.corpus.uri or join_uri(run_uri, CORPUS_FOLDER))
    if f"{run_uri}/".startswith(f"{corpus_uri.rstrip('/')}/"):
        need = "need a folder outside of it: verify knows each object of a corpus by ingest"
        raise ConfigurationError(f"--run {run_uri} lies in corpus.uri = {corpus_uri}: {need}")
    return corpus_uri


def _bases(recipe: Recipe, run_uri: str, arguments: argparse.Namespace) -> Bases:
    """Return the bases of a run, as they are recorded or as the command line asks for.

    Raises ConfigurationError for a recipe or a base with which no run can take over work.
    """
    extends: str = getattr(arguments, "extends", "")
    base = extends or getattr(arguments, "labelled_from", "")
    taken: Taken = "all" if extends else "labelled"
    runs = (run_uri, *([normalize_uri(base)] if base else []))
    try:
        if base:
            require_beside(run_uri, base, OPTIONS[taken])
        records = ObjectStore(tuple(join_uri(run, STEP_RECORDS_FOLDER) for run in runs))
        found = bases_of(records, run_uri, base, taken) if base else read_bases(records, run_uri)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if found.runs:
        require_takeover(recipe, found.option)
    return found


def require_unlabelled(job: Job) -> None:
    """Raise ConfigurationError in a run of labelled speech alone, for a step that needs other."""
    metadata = join_uri(job.corpus_uri, METADATA_FOLDER, UNLABELLED)
    if job.has(features_step(LABELLED)) and not job.has_unlabelled:
        raise ConfigurationError(
            f"{job.run_uri} has no features of unlabelled speech, which {job.name} needs: add its "
            f"metadata to {metadata} and run {SELECT_UTTERANCES} "
            f"and {EXTRACT_FEATURES} again, or begin another run of it with {LABELLED_FROM} "
            f"{job.run_uri}; baseline and teacher are scored by --only {BUILD_GRAPH} "
            f"--only {EVALUATE} --only {REPORT}"
        )


def require_moments(job: Job) -> None:
    """Raise ConfigurationError if the aligner is to be normalized by features that are missing."""
    if job.recipe.models.normalization == "all" and not job.has_unlabelled:
        raise ConfigurationError(
            f"models: normalization = 'all': {job.run_uri} has no features of unlabelled speech: "
            f"run {EXTRACT_FEATURES} on some first, or set 'labelled'"
        )


def require_bases(arguments: argparse.Namespace, recipe: Recipe) -> None:
    """Raise ValueError for a base that the command line names and no such run can have."""
    for option, base in ((EXTENDS, arguments.extends), (LABELLED_FROM, arguments.labelled_from)):
        if base:
            require_beside(arguments.run, base, option)
            require_takeover(recipe, option)


def require_takeover(recipe: Recipe, option: str) -> None:
    """Raise ConfigurationError for a recipe by which no run can have the base of this option."""
    if not recipe.corpus.uri:
        raise ConfigurationError(
            f"corpus: uri = '': with {option} a run needs the corpus that its base has read: set "
            "the folder in both recipes, outside of any run"
        )
    if option == LABELLED_FROM and recipe.models.normalization != "labelled":
        raise ConfigurationError(
            f"models: normalization = {recipe.models.normalization!r}: need 'labelled' with "
            f"{option}: else the models that it takes over depend on the base's unlabelled speech"
        )
    if option == EXTENDS and recipe.targets.rounds > 1:
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
    scratch = commit_uris(job.store, job.run_uri, join_uri(step, SCRATCH_FOLDER))
    if step == EVALUATION_STEP:
        return scratch
    # A selection also indexes its buckets, and packs what it has selected. An alignment that grows
    # a tree reads the features once more for their senones.
    reading = SELECTED_PREFIX, PHONES_PREFIX
    found = [each for each in scratch if each.rpartition("/")[2].startswith(reading)]
    return found or commit_uris(job.store, job.run_uri, step)


def training_hours(job: Job, fit: Fit) -> tuple[float, float]:
    """Return the hours of a training's data that its newest checkpoint is worth, and all of them.

    All hours are 0 where the data are not there yet.
    """
    data = (fit.labelled, *([fit.unlabelled] if fit.unlabelled else []))
    if not all(job.has(step) for step in data):
        return 0.0, 0.0
    hours = [job.manifest(step).tally_out.hours for step in data]
    labelled, unlabelled = (*hours, 0.0)[:2]
    place = newest_place(job.store, job.run_uri, model_step(fit.name))
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
            manifest = job.manifest(step)
            if manifest.is_inherited and folder_of(step) == SELECTION_FOLDER:
                continue  # the other subsets are selected whole
            config = manifest.config
            before = {
                name: each for name, each in config.items() if name not in COMMAND_LINE_SETTINGS
            }
            found[step] = changes(before, now[step]) if before and step in now else []
        elif _has_work(job, [step]):
            found[step] = changes_since_start(job)
    return {step: named for step, named in found.items() if named}


def require_base(jobs: Sequence[Job], new_lexicon: bytes | None) -> None:
    """Raise ConfigurationError if the base of an increment is unfinished, or of another recipe.

    A base has all that the run takes over. One that is extended may have features alone.
    `new_lexicon` is what ingest will write, None if it brings none.
    """
    bases = jobs[0].bases
    if not bases.runs:
        return
    recipe, base = jobs[0].recipe, bases.runs[0]
    stores = {step: job.store for job in jobs for step in written_steps(recipe, job.name)}
    there = {step for step, store in stores.items() if is_finished(store, base, step)}
    of_base = {
        name: each
        for name, each in written(recipe).items()
        if is_taken_over(each, bases) or (bases.extends and each.in_increment == "extended")
    }
    needed = [name for name, each in of_base.items() if not each.is_optional]
    of_training = (ALIGNMENTS_FOLDER, MODELS_FOLDER, TARGETS_FOLDER)
    if bases.extends and not any(folder_of(step) in of_training for step in there):
        needed = [selection_step(UNLABELLED), features_step(UNLABELLED)]
    if missing := [step for step in needed if step not in there]:
        raise unfinished(base, missing)
    now = step_configs(recipe, recipe, features_step(DEV) in there)
    for job in jobs:
        for step in written_steps(recipe, job.name):
            if step in there & now.keys() & of_base.keys():
                found = BaseStep(base, *read_with_digest(job.store, base, step))
                _require_same(job, found, now, new_lexicon)


def is_taken_over(step: Written, bases: Bases) -> bool:
    """Return whether a run with these bases takes a step over as it is."""
    return step.in_increment == "labelled" or (
        bool(bases.extends) and step.in_increment == "inherited"
    )


def bases_said(job: Job) -> list[str]:
    """Say from which runs the job's run takes over, a line each; none without any."""
    lines = [f"  extends {each}" for each in job.bases.extends]
    return lines + [f"  labelled from {each}" for each in job.bases.labelled_from]


def unfinished(base: str, missing: Sequence[str]) -> ConfigurationError:
    """Say what a base lacks that is to be taken over from it."""
    return ConfigurationError(
        f"{base} is unfinished: it has no manifest of {', '.join(missing)}: finish it, or name "
        "another run"
    )


def take_over(job: Job) -> None:
    """Record the job's base, and store the manifests that the job inherits from it.

    Raises ConfigurationError if the base was made with other settings, or by another lexicon, and
    if it has not finished what it has to.
    """
    base, rows = job.bases.runs[0], STEPS[job.name].writes(job.recipe)
    inherited = [each for each in rows if is_taken_over(each, job.bases)]
    there = [each for each in inherited if is_finished(job.store, base, each.name)]
    needed = [each.name for each in inherited if not each.is_optional and each not in there]
    if needed and not job.bases.extends:
        raise unfinished(base, needed)
    has_dev = any(each.fit for each in there) and is_finished(job.store, base, features_step(DEV))
    now = step_configs(job.recipe, job.recipe, has_dev)
    steps = [BaseStep(base, *read_with_digest(job.store, base, each.name)) for each in there]
    for step in steps:
        _require_same(job, step, now, new_lexicon=None)
        require_same_language_model(job, step)
    record_bases(job.store, job.run_uri, base, "all" if job.bases.extends else "labelled")
    for step in steps:
        step.inherit(job.store, job.run_uri)


def require_same_language_model(job: Job, base: BaseStep) -> None:
    """Raise ConfigurationError if what a step of the base read was replaced under its name."""
    for setting in LANGUAGE_MODEL_SETTINGS:
        used, name = base.manifest.inputs.get(setting), getattr(job.recipe.evaluation, setting)
        if used is None or not name:
            continue
        uri = resolve_audio(job.corpus_uri, name)
        if (digest := sha256(job.store.get(uri))) != used:
            raise ConfigurationError(
                f"{base.run_uri}: {base.manifest.step} was made of another {setting}: {uri}: "
                f"SHA-256 {used[:12]} -> {digest[:12]}: put the one of the base there, or begin a "
                f"run without {job.bases.option}"
            )


def _require_same(
    job: Job, base: BaseStep, now: Mapping[str, Mapping[str, Any]], new_lexicon: bytes | None
) -> None:
    """Raise ConfigurationError if a step of the base is not what this run's recipe would make."""
    found, config = base.manifest, now[base.manifest.step]
    may_differ: Collection[str] = ()
    if found.step == selection_step(UNLABELLED):
        may_differ = MAY_DIFFER
    elif folder_of(found.step) == SELECTION_FOLDER:
        may_differ = config  # the other subsets are selected whole
    try:
        base.require_same(config, may_differ, job.bases.option)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if job.bases.extends:
        return
    said = f"{base.run_uri}: {found.step} was made"
    remedy = f"set it so, or begin a run without {LABELLED_FROM}"
    if features_step(UNLABELLED) in found.inputs:
        setting = "models.normalization: all -> labelled"
        raise ConfigurationError(f"{said} with another setting: {setting}: {remedy}")
    if (used := found.inputs.get(LEXICON_FILE)) is not None:
        uri = join_uri(job.corpus_uri, LEXICON_FILE)
        data = job.store.get(uri) if new_lexicon is None else new_lexicon
        if (digest := sha256(data)) != used:
            raise ConfigurationError(
                f"{said} by another lexicon: {uri}: SHA-256 {used[:12]} -> {digest[:12]}: put the "
                f"one of the base there, or begin a run without {LABELLED_FROM}"
            )


def _has_work(job: Job, steps: Sequence[str]) -> bool:
    """Return whether tasks or checkpoints of these steps are stored."""
    return any(job.store.list(join_uri(job.run_uri, step)) for step in steps)
