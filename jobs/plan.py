"""Plan a run: objects, requests, bytes, core-hours, days and dollars of each step, before it runs.

python -m jobs.plan --hours 1e6
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from infra.cluster import load_cluster
from infra.configuration import ConfigurationError
from infra.store.object_store import ObjectStore, StoreError, normalize_uri
from jobs.cli.command_line import recipe_path
from jobs.planning.calibration.machine import calibrate
from jobs.planning.calibration.throughputs import Calibration, read_calibration
from jobs.planning.plan_record import keep_plan, to_json
from jobs.planning.run_plan import plan_run
from jobs.planning.table import format_plan
from jobs.planning.volumes.workload import (
    LABELLED_SHARE,
    UTTERANCE_SECONDS,
    Workload,
    planned_workload,
    run_workload,
)
from training.recipes import Recipe, read_recipe

EPILOG = """\
Core-hours are what cores compute; an instance's hours, and its price, are its wall-clock time.
Without --calibration the pipeline's own functions are timed here, on made-up speech, for some 20
seconds; GPUs that this machine does not have come from published figures
(jobs/calibrations/published.toml). To plan for other machines, calibrate there with --calibrate-to
and bring the file.
Exit codes: 0 done, 1 failed, 2 bad usage or recipe.
"""


def parser() -> argparse.ArgumentParser:
    """The arguments of the plan."""
    found = argparse.ArgumentParser(
        prog="jobs/plan.py",
        description="Say what each step of a run will make, take and cost: files, objects, S3 "
        "requests, bytes, core-hours, device-hours, wall-clock time and dollars, on the clusters "
        "of infra/clusters, against the paper's 12 days for a million hours.",
        epilog=EPILOG,
    )
    add = found.add_argument
    add("--recipe", default="hours_1m", help="TOML file, or a name in jobs/recipes (hours_1m)")
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    add("--cluster", help="one cluster TOML or name for all steps; default: the recipe's")
    add("--hours", type=float, help="unlabelled hours; default: the run's, or the recipe's")
    add("--labelled-hours", type=float, help="default: 0.7 %% of --hours, the paper's share")
    add("--utterance-seconds", type=float, default=UTTERANCE_SECONDS, help="mean length (3.6)")
    add("--run", help="take the hours from this run, and keep plan and calibration in <run>/plan")
    source = found.add_mutually_exclusive_group()
    source.add_argument("--calibration", metavar="FILE", help="measure nothing; JSON or TOML")
    source.add_argument("--calibrate-to", metavar="FILE", help="keep what is measured, as JSON")
    add("--json", action="store_true", help="print one JSON object")
    return found


def main() -> None:
    """Parse the command line, plan, print; exit with 0, 1 or 2."""
    arguments = parser().parse_args()
    try:
        plan_and_print(arguments)
    except (ConfigurationError, ValueError) as error:
        sys.exit(fail(error, 2))
    except (StoreError, OSError) as error:
        sys.exit(fail(error, 1))


def fail(error: Exception, code: int) -> int:
    """Say on standard error what went wrong."""
    print(f"plan: {error}", file=sys.stderr)
    return code


def plan_and_print(arguments: argparse.Namespace) -> None:
    """Calibrate, plan, keep what should be kept, print."""
    recipe = read_recipe(recipe_path(arguments.recipe), arguments.set)
    run_uri = normalize_uri(arguments.run) if arguments.run else None
    store = ObjectStore((run_uri,)) if run_uri else None
    workload = choose_workload(arguments, recipe, store, run_uri)
    calibration = choose_calibration(arguments, recipe)
    cluster = arguments.cluster or recipe.cluster
    plan = plan_run(workload, recipe, calibration, lambda step: load_cluster(cluster or step))
    if store is not None and run_uri is not None:
        keep_plan(store, run_uri, plan, calibration)
    print(
        json.dumps(to_json(plan, calibration)) if arguments.json else format_plan(plan, calibration)
    )


def choose_workload(
    arguments: argparse.Namespace, recipe: Recipe, store: ObjectStore | None, run_uri: str | None
) -> Workload:
    """The hours that were asked for, or else the run's, or else the recipe's."""
    if arguments.hours is None and store is not None and run_uri is not None:
        found = run_workload(store, run_uri, recipe.selection.hours)
        if found is not None:
            return found
    hours = arguments.hours if arguments.hours is not None else recipe.selection.hours
    if hours == 0:
        raise ConfigurationError(
            f"hours = 0: {recipe.name} takes all there is, and no run tells how much: give "
            "--hours, or --run of a run whose corpus was ingested"
        )
    labelled = arguments.labelled_hours
    labelled_hours = LABELLED_SHARE * hours if labelled is None else labelled
    return planned_workload(hours, labelled_hours, arguments.utterance_seconds)


def choose_calibration(arguments: argparse.Namespace, recipe: Recipe) -> Calibration:
    """The given calibration, or one of this machine."""
    if arguments.calibration:
        return read_calibration(arguments.calibration)
    print("plan: calibrating on this machine", file=sys.stderr)
    calibration = calibrate(recipe, arguments.utterance_seconds)
    if arguments.calibrate_to:
        text = json.dumps(asdict(calibration), indent=1) + "\n"
        Path(arguments.calibrate_to).write_text(text, encoding="utf-8")
    return calibration


if __name__ == "__main__":
    main()
