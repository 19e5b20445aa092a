"""Plan a run: objects, requests, core-hours, days and dollars a step.

megahour plan --hours 1e6
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from infra.cluster import Cluster, load_cluster
from infra.settings import ConfigurationError, printable
from infra.store.object_store import ObjectStore, StoreError, normalize_uri
from jobs.cli.arguments import Parser, recipe_path
from jobs.cli.command_line import fail
from jobs.cli.job import add_recipe_arguments
from jobs.planning.calibration import Calibration, read_calibration
from jobs.planning.plan_table import format_plan
from jobs.planning.run_plan import plan_run, store_plan, to_json
from jobs.planning.workload import (
    LABELLED_SHARE,
    UTTERANCE_SECONDS,
    planned_workload,
    run_workload,
)
from jobs.run_table import STEPS
from jobs.volumes import Workload
from training.settings.recipe import Recipe, read_recipe

EPILOG = """\
Core-hours count the time that cores compute; instances are paid for by wall-clock time. Without
--calibration, the plan times the steps of the pipeline here, on synthetic speech, for 20 seconds;
GPUs that this machine does not have, and searches of real speech (alignment, lattices, decoding),
come from published figures (jobs/calibrations/published.toml).
To plan for another machine, run --calibrate-to FILE there, and give the file to --calibration here.
Exit codes: 0 done, 1 failed, 2 bad usage or recipe.
"""


def parser() -> Parser:
    """Return a parser of the arguments of the plan."""
    found = Parser(
        prog="megahour plan",
        description="Plan a run before it starts: the tasks, objects, requests, bytes, "
        "core-hours, device-hours, wall-clock time and dollars of each step, on the clusters of "
        "infra/clusters, and compare them with the 12 days of paper 003 for a million hours.",
        epilog=EPILOG,
    )
    add = found.add_argument
    add_recipe_arguments(found, default="hours_1m")
    add("--cluster", help="cluster TOML, or a name in infra/clusters; default: the recipe's")
    other = "another cluster for one step; repeat it for more"
    add("--step-cluster", action="append", default=[], metavar="STEP=CLUSTER", help=other)
    add("--hours", type=float, help="unlabelled hours; default: those of the run or the recipe")
    add("--labelled-hours", type=float, help="default: 0.7 %% of --hours, the share of the paper")
    add("--dev-hours", type=float, default=0.0, help="hours of development speakers; default 0")
    decoded = "hours to evaluate on; default 0: no evaluation is planned"
    add("--heldout-hours", type=float, default=0.0, help=decoded)
    length = f"mean length of an utterance, default {UTTERANCE_SECONDS:g}"
    add("--utterance-seconds", type=float, default=UTTERANCE_SECONDS, help=length)
    together = "utterances whose audio one GET reads: segments of long recordings, members of tars"
    add("--utterances-per-request", type=float, default=1.0, help=f"{together}; default 1")
    add("--run", help="take the hours of this run, and store plan and calibration in <run>/plan")
    source = found.add_mutually_exclusive_group()
    source.add_argument("--calibration", metavar="FILE", help="JSON or TOML; measure nothing")
    source.add_argument("--calibrate-to", metavar="FILE", help="store the measurement as JSON")
    add("--json", action="store_true", help="print one JSON object")
    return found


def main() -> None:
    """Parse the command line, plan, print; exit with 0, 1 or 2."""
    arguments = parser().parse_args()
    try:
        plan_and_print(arguments)
    except (ConfigurationError, ValueError) as error:
        sys.exit(fail("plan", error, 2))
    except (StoreError, OSError) as error:
        sys.exit(fail("plan", error, 1))


def plan_and_print(arguments: argparse.Namespace) -> None:
    """Calibrate, plan, store the plan in the run if one is given, print."""
    recipe = read_recipe(recipe_path(arguments.recipe), arguments.set)
    run_uri = normalize_uri(arguments.run) if arguments.run else None
    store = ObjectStore((run_uri,)) if run_uri else None
    workload = choose_workload(arguments, recipe, store, run_uri)
    calibration = choose_calibration(arguments, recipe)
    clusters = step_clusters(arguments.step_cluster)
    every = arguments.cluster or recipe.cluster

    def cluster_of(step: str) -> Cluster:
        return load_cluster(clusters.get(step) or every or step)

    plan = plan_run(workload, recipe, calibration, cluster_of)
    if store is not None and run_uri is not None:
        store_plan(store, run_uri, plan, calibration)
    print(
        json.dumps(to_json(plan, calibration)) if arguments.json else format_plan(plan, calibration)
    )


def step_clusters(given: Sequence[str]) -> dict[str, str]:
    """Parse STEP=CLUSTER; ConfigurationError for a step that is not planned."""
    found = {}
    for text in given:
        step, _, cluster = text.partition("=")
        if step not in STEPS or not cluster:
            need = f"need STEP=CLUSTER, of the steps {', '.join(STEPS)}"
            raise ConfigurationError(f"--step-cluster {printable(text)}: {need}")
        found[step] = cluster
    return found


def choose_workload(
    arguments: argparse.Namespace, recipe: Recipe, store: ObjectStore | None, run_uri: str | None
) -> Workload:
    """Return the workload of the hours given, or else of the run, or else of the recipe."""
    if arguments.hours is None and store is not None and run_uri is not None:
        found = run_workload(store, run_uri, recipe.selection.hours)
        if found is not None:
            return found
    hours = arguments.hours if arguments.hours is not None else recipe.selection.hours
    if hours == 0:
        raise ConfigurationError(
            f"hours = 0: {recipe.name} selects all hours, and there is no run to count them: "
            "give --hours, or --run of a run whose corpus was ingested"
        )
    labelled = arguments.labelled_hours
    labelled_hours = LABELLED_SHARE * hours if labelled is None else labelled
    return planned_workload(
        hours,
        labelled_hours,
        arguments.utterance_seconds,
        arguments.dev_hours,
        arguments.heldout_hours,
        arguments.utterances_per_request,
    )


def choose_calibration(arguments: argparse.Namespace, recipe: Recipe) -> Calibration:
    """Read the given calibration, or measure this machine."""
    if arguments.calibration:
        return read_calibration(arguments.calibration)
    # Here, as a plan from a file measures nothing and needs no torch.
    from jobs.planning.measurement import calibrate  # noqa: PLC0415

    print("plan: calibrating on this machine", file=sys.stderr)
    calibration = calibrate(recipe, arguments.utterance_seconds)
    if arguments.calibrate_to:
        text = json.dumps(asdict(calibration), indent=1) + "\n"
        Path(arguments.calibrate_to).write_text(text, encoding="utf-8")
    return calibration


if __name__ == "__main__":
    main()
