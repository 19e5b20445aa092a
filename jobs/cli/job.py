"""Open a job: parse its arguments, read its recipe and cluster, confine its store."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

from infra.cluster import Cluster, load_cluster
from infra.settings import ConfigurationError, holds_password, printable
from infra.store.object_store import ObjectStore, join_uri, normalize_uri
from infra.task_metrics import TaskTotals
from infra.torchrun import launched_rank
from jobs.cli.catalogue import EVALUATE, GENERATE_TARGETS, REPORT, writes_of
from jobs.cli.parser import Parser, add_log_argument, recipe_path
from pipeline.runs.increment import Increment, chain_of, read_increment, require_beside
from pipeline.runs.manifest import manifest_uri
from pipeline.runs.names import (
    BOOTSTRAP_STEP,
    CORPUS_FOLDER,
    EVALUATED_MODELS,
    OPTIONAL_STEPS,
    STEP_RECORDS_FOLDER,
    evaluated_models,
    labelling_models,
    model_step,
    targets_rounds,
)
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
    increment: Increment | None = None

    def take_pace(self, model: str, pace: Sequence[Any]) -> None:
        """Keep the pace of a model's sub-epochs for the job's record."""
        self.pace[model] = [asdict(each) for each in pace]


def written_steps(recipe: Recipe, name: str) -> tuple[str, ...]:
    """Return the steps whose manifests the job `name` writes under a recipe."""
    return writes_of(
        name,
        recipe.alignment.rounds,
        recipe.sequence_training.models,
        has_lattice_targets=recipe.targets.source == "lattice",
        ensemble=recipe.num_teachers,
        num_target_rounds=recipe.targets.rounds,
    )


def written_manifests(recipe: Recipe, name: str, run_uri: str) -> list[str]:
    """Return the manifests that a run has once the job `name` is done, whatever its speakers."""
    steps = (step for step in written_steps(recipe, name) if step not in OPTIONAL_STEPS)
    return [manifest_uri(run_uri, step) for step in steps]


def read_steps(recipe: Recipe, name: str, reads: Sequence[str]) -> tuple[str, ...]:
    """Return the steps whose manifests the job `name` reads, of which a recipe decides the models.

    `reads` are those that it reads under a recipe of one teacher, without sequence training. Only
    a teacher of the user's own reads the tree of senones.
    """
    trained = recipe.sequence_training.models, recipe.num_teachers
    rounds = recipe.targets.rounds
    scored = evaluated_models(*trained, rounds)
    labelling = (labelling_models(*trained, each) for each in targets_rounds(rounds))
    models = {
        GENERATE_TARGETS: tuple(chain.from_iterable(labelling)),
        EVALUATE: scored,
        REPORT: scored,
    }
    if name not in models:
        return tuple(reads)
    plain = {model_step(model) for model in EVALUATED_MODELS}
    if name == GENERATE_TARGETS and recipe.num_teachers:
        plain.add(BOOTSTRAP_STEP)
    return (*(s for s in reads if s not in plain), *map(model_step, models[name]))


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


def add_recipe_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add --recipe, required unless it has a default, and --set."""
    parser.add_argument(
        "--recipe",
        required=default is None,
        default=default,
        help="TOML file, or a name in jobs/recipes: "
        + (f"default {default}" if default else "demo, recorded, placements, hours_1m"),
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="replace one value of the recipe; repeat it for more",
    )
    # Training steps name the trainer of their section here.
    parser.set_defaults(trainers={})


def open_job(name: str, arguments: argparse.Namespace) -> Job:
    """Read the recipe and confine the store to the prefixes that the job's cluster may use."""
    recipe = read_recipe(recipe_path(arguments.recipe), arguments.set, arguments.trainers)
    run_uri = normalize_uri(arguments.run)
    if holds_password(run_uri):
        need = "need one without: credentials come from the environment, a profile or a role"
        raise ConfigurationError(f"--run {printable(run_uri)}: a password or a signature: {need}")
    corpus_uri = normalize_uri(recipe.corpus.uri or join_uri(run_uri, CORPUS_FOLDER))
    cluster = load_cluster(arguments.cluster or recipe.cluster or name)
    increment = _increment(recipe, run_uri, getattr(arguments, "extends", ""))
    # A step may read of the runs that it extends what it may read of its own.
    runs = (run_uri, *(increment.bases if increment else ()))
    prefixes = [each for run in runs for each in cluster.readable(run, corpus_uri)]
    store = ObjectStore((*prefixes, *recipe.corpus.audio_prefixes))
    is_leader = launched_rank() == 0
    place = name, recipe, run_uri, corpus_uri, store, cluster, arguments, is_leader
    return Job(*place, increment=increment)


def _increment(recipe: Recipe, run_uri: str, extends: str) -> Increment | None:
    """Return what a run extends, as it is recorded or as the command line asks for.

    Raises ConfigurationError for a recipe or a base that no increment can have.
    """
    runs = [run_uri, *([normalize_uri(extends)] if extends else [])]
    try:
        if extends:
            require_beside(*runs)
        records = ObjectStore(tuple(join_uri(run, STEP_RECORDS_FOLDER) for run in runs))
        found = chain_of(records, *runs) if extends else read_increment(records, run_uri)
    except ValueError as error:
        raise ConfigurationError(str(error)) from error
    if found is not None:
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
