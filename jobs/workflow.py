"""Print a run's steps as JSON, as a scheduler such as Airflow reads it.

megahour workflow --recipe R --run 's3://bucket/runs/{{ ds }}' > nightly.workflow.json
"""

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from infra.platforms.accounts import load_account
from infra.platforms.emr import Emr
from infra.settings import ConfigurationError, Range, printable
from infra.spark.session import spark_environment
from infra.store.uris import normalize_uri
from infra.supervisor import CALLER, command_of
from jobs.cli.arguments import (
    INGEST_OPTIONS,
    Parser,
    add_launch_arguments,
    add_placement_arguments,
    add_recipe_arguments,
    add_source_arguments,
    cluster_of,
    given_options,
    number_in,
    recipe_path,
    recognizer_and_uri,
    require_no_passwords,
    require_source_options,
    source_uris,
    step_clusters,
    subset_and_uri,
)
from jobs.cli.command_line import ending
from jobs.cli.job import require_bases, require_prefixes
from jobs.request_cluster import require_remote
from jobs.run import JOBS, Launch, launches_of, shared_arguments
from jobs.run_table import INGEST, STEPS, due_steps, written, written_steps
from pipeline.runs.manifest import manifest_uri
from pipeline.runs.names import UNLABELLED
from training.settings.recipe import Recipe, read_recipe

NAME = "workflow"

HELP = """\
Print the steps of a run in order, as JSON: each with its name, its command and the manifests that
it writes. infra/airflow/megahour_dag.py makes a DAG of it, with a task group for each step. Put
both into Airflow's DAG folder.

Texts may have Airflow's templates in them: {{ ds }} is the date of a DAG's run, so
--run 's3://bucket/runs/{{ ds }}' gives each night a run of its own. Airflow 3 takes the date on
which a scheduled run begins; {{ macros.ds_add(ds, -1) }} is the day before.

With --extends each night's run extends an earlier one. This names the last that succeeded, and
before there is one, the run `first` that trained the teacher:
--extends 's3://bucket/runs/{{ prev_data_interval_start_success | ds
  if prev_data_interval_start_success else "first" }}'

Without --account all steps run on the scheduler's worker, in this Python environment. With it each
runs on a cluster of its own, by megahour request_cluster --send. A Kaldi directory is copied on the
worker all the same.
"""


def workflow_steps(arguments: argparse.Namespace, recipe: Recipe) -> Iterator[dict[str, object]]:
    """Yield the steps from the first to the last wanted one, as `megahour run` would start them.

    Each has a name that no other has, its command, and the URIs of its manifests.
    """
    steps = launches_of(arguments, recipe, given_options(arguments, INGEST_OPTIONS))
    order = list(STEPS)
    places = [order.index(launch.step) for launch in steps]
    # Rounds repeat steps: from the first start of one step to the last of the other.
    first = next(n for n, place in enumerate(places) if place >= order.index(arguments.first))
    last = max(n for n, place in enumerate(places) if place <= order.index(arguments.last))
    times: Counter[str] = Counter()
    without = set(order) - {launch.step for launch in steps}
    there = {made for step in without for made in written_steps(recipe, step)}
    # A run takes over what the rounds of its base have made.
    taken = {
        each.name
        for each in written(recipe).values()
        if arguments.extends or (arguments.labelled_from and each.in_increment == "labelled")
    }
    for number, launch in enumerate(steps):
        times[launch.step] += 1
        has = (there | taken).__contains__
        made = [s for s in due_steps(recipe, launch.step, has) if s not in there]
        there.update(made)
        if first <= number <= last:
            ordinal = times[launch.step]
            name = launch.step if ordinal == 1 else f"{launch.step}_{ordinal}"
            cluster = cluster_of(launch.step, arguments, recipe.cluster)
            if _is_launched(arguments, launch):
                require_remote(cluster)
            require_prefixes(launch.step, recipe, cluster, arguments.run)
            manifests = [manifest_uri(arguments.run, each) for each in made]
            command = _command(arguments, launch)
            yield {"name": name, "command": command, "manifests": manifests}


def _is_launched(arguments: argparse.Namespace, launch: Launch) -> bool:
    """Return whether a step runs on a cluster of its own; a directory is copied here."""
    return bool(arguments.account and (launch.step != INGEST or arguments.manifest))


def _command(arguments: argparse.Namespace, launch: Launch) -> list[str]:
    shared = shared_arguments(arguments.recipe, arguments)
    if _is_launched(arguments, launch):
        ours = (sys.executable, str(JOBS / "request_cluster.py"), "--step", launch.step, "--send")
        manifests = launch.arguments if launch.step == INGEST else ()
        return [*ours, *shared, *manifests, "--account", arguments.account]
    # The supervisor ends all processes of the step when Airflow ends the task, for whatever reason.
    return command_of(launch.command(shared), CALLER)


def main() -> None:
    """Parse the command line and print the workflow; exit with 0, 1 or 2."""
    arguments = _parser().parse_args()
    with ending(NAME):
        print(json.dumps(describe(arguments), indent=1))


def describe(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the document; ConfigurationError for what no step could use."""
    order = list(STEPS)
    if order.index(arguments.first) > order.index(arguments.last):
        raise ConfigurationError(
            f"--first {arguments.first}: need a step that --last {arguments.last} does not precede"
        )
    if arguments.first == INGEST and not (arguments.kaldi_dir or arguments.manifest):
        remedy = "give --kaldi-dir, --manifest, or where the corpus is there, --first"
        raise ConfigurationError(f"nothing to {INGEST}: {remedy} {order[1]}")
    require_source_options(arguments)
    if arguments.account:
        _require_account(arguments)
    recipe = read_recipe(recipe_path(arguments.recipe), arguments.set)
    # A worker has another working directory.
    arguments.run = normalize_uri(arguments.run)
    require_bases(arguments, recipe)
    for name in ("recipe", "account", "cluster"):
        if given := getattr(arguments, name):
            setattr(arguments, name, _resolved(given))
    if arguments.kaldi_dir:
        arguments.kaldi_dir = str(Path(arguments.kaldi_dir).resolve())
    for name in ("extends", "labelled_from", "lexicon", "language_model", "recordings"):
        if given := getattr(arguments, name):
            setattr(arguments, name, normalize_uri(given))
    if arguments.manifest:
        named = map(subset_and_uri, arguments.manifest)
        arguments.manifest = [
            uri if subset == UNLABELLED else f"{subset}={uri}" for subset, uri in named
        ]
    if arguments.transcripts:
        heard = map(recognizer_and_uri, arguments.transcripts)
        arguments.transcripts = [f"{name}={uri}" for name, uri in heard]
    require_no_passwords([arguments.run, *source_uris(arguments)])
    own = step_clusters(arguments.step_cluster).items()
    arguments.step_cluster = [f"{step}={_resolved(file)}" for step, file in own]
    steps = list(workflow_steps(arguments, recipe))
    if not steps:
        # A scheduler would take a run of nothing for done.
        said = f"--first {arguments.first} --last {arguments.last}"
        raise ConfigurationError(f"{said}: this run has none of these steps: need one")
    added = spark_environment()
    return {
        "name": arguments.name,
        "schedule": arguments.schedule,
        "start_date": arguments.start_date,
        "retries": arguments.retries,
        "retry_delay_s": arguments.retry_delay_s,
        "environment": {name: added[name] for name in ("JAVA_HOME", "PATH", "PYSPARK_PYTHON")},
        "steps": steps,
    }


def _require_account(arguments: argparse.Namespace) -> None:
    """Raise ConfigurationError for an account that launches nothing, and for ranks beside it."""
    if not isinstance(load_account(arguments.account), Emr):
        need = "need one of emr, whose clusters request_cluster launches"
        raise ConfigurationError(f"--account {arguments.account}: {need}")
    defaults = _parser()
    for name in ("supervised_ranks", "student_ranks", "device"):
        if getattr(arguments, name) != defaults.get_default(name):
            raise ConfigurationError(
                f"--{name.replace('_', '-')} with --account: a step's cluster file says how "
                "many ranks and GPUs it has: leave it out"
            )


def _resolved(path: str) -> str:
    """Return the whole path of a file that exists; a name or a URI stays as it is."""
    return str(Path(path).resolve()) if Path(path).is_file() else path


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog=f"megahour {NAME}",
        description=HELP,
        epilog="Exit codes: 0 printed, 1 failed, 2 bad usage or recipe.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add_recipe_arguments(parser)
    add("--run", required=True, help="folder or s3:// URI that holds the run; may have a template")
    add_launch_arguments(parser)
    add("--account", metavar="FILE", help="TOML file of an account of emr: a cluster for each step")
    names = ", ".join(STEPS)
    add("--first", choices=STEPS, default=next(iter(STEPS)), metavar="STEP", help=f"of {names}")
    add("--last", choices=STEPS, default=list(STEPS)[-1], metavar="STEP", help="of the same")
    add("--name", type=_name, default="megahour", help="the DAG's name; default megahour")
    schedule = "when it runs, as Airflow has it: @daily, or a cron line; default: on request"
    add("--schedule", metavar="WHEN", help=schedule)
    add(
        "--start-date",
        type=_date,
        default="2026-01-01",
        metavar="DATE",
        help="the first interval's begin, as 2026-01-01",
    )
    several, delay = number_in(Range(0, 1000), int), number_in(Range(0, 86_400), int)
    add("--retries", type=several, default=3, metavar="N", help="of each step; default 3")
    add("--retry-delay-s", type=delay, default=300, metavar="S", help="before each; default 300")
    add_source_arguments(parser, required=False)
    add_placement_arguments(parser)
    return parser


def _name(text: str) -> str:
    if re.fullmatch(r"[A-Za-z]\w{0,99}", text, re.ASCII):
        return text
    raise argparse.ArgumentTypeError(f"{printable(text)}: need a letter, then letters, digits or _")


def _date(text: str) -> str:
    try:
        datetime.fromisoformat(text)
    except ValueError as error:
        need = "need a date such as 2026-01-01"
        raise argparse.ArgumentTypeError(f"{printable(text)}: {need}") from error
    return text


if __name__ == "__main__":
    main()
