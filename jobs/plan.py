"""Plan a run: objects, requests, core-hours, days and dollars a step.

megahour plan --hours 1e6
"""

import argparse
import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from math import ceil
from pathlib import Path

from infra.extras import how_to_install, lacking
from infra.settings import ConfigurationError, Range
from infra.store.object_store import ObjectStore, normalize_uri
from jobs.cli.arguments import (
    Parser,
    add_cluster_arguments,
    add_recipe_arguments,
    cluster_of,
    number_in,
    recipe_path,
)
from jobs.cli.command_line import ending
from jobs.planning.calibration import TWO_CORES, Calibration, read_calibration
from jobs.planning.run_plan import (
    DOLLARS_A_GIGABYTE_MONTH,
    LABELLED_SHARE,
    PAPER_DAYS,
    PAPER_HOURS,
    PRICES_SOURCE,
    S3_READS_PER_PREFIX_S,
    SPARK_START_S,
    UTTERANCE_SECONDS,
    RunPlan,
    StepPlan,
    plan_run,
    planned_workload,
    run_workload,
    store_plan,
    to_json,
)
from jobs.run_table import STEPS
from jobs.volumes import AUDIO_BYTES_PER_HOUR, Workload
from pipeline.runs.names import UNLABELLED
from training.settings.recipe import Recipe, read_recipe

EPILOG = """\
Core-hours count the time that cores compute; instances are paid for by wall-clock time. Without
--calibration, the plan times the steps of the pipeline here, on synthetic speech, for 20 seconds,
where the extras spark and train are installed, and takes two_cores elsewhere.
GPUs that this machine does not have, and searches of real speech (alignment, lattices, decoding),
come from published figures (jobs/calibrations/published.toml).
To plan for another machine, run --calibrate-to FILE there, and give the file to --calibration here:
what it leaves out is published.
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
    add_cluster_arguments(found)
    add("--hours", type=float, help="unlabelled hours; default: those of the run or the recipe")
    add("--labelled-hours", type=float, help="default: 0.7 %% of --hours, the share of the paper")
    add("--dev-hours", type=float, default=0.0, help="hours of development speakers; default 0")
    decoded = "hours to evaluate on; default 0: no evaluation is planned"
    add("--heldout-hours", type=float, default=0.0, help=decoded)
    length = f"mean length of an utterance, default {UTTERANCE_SECONDS:g}"
    seconds = number_in(Range(0.01, 3600))
    add("--utterance-seconds", type=seconds, default=UTTERANCE_SECONDS, help=length)
    together = "utterances whose audio one GET reads: segments of long recordings, members of tars"
    add("--utterances-per-request", type=float, default=1.0, help=f"{together}; default 1")
    add("--run", help="take the hours of this run, and store plan and calibration in <run>/plan")
    source = found.add_mutually_exclusive_group()
    given = "JSON or TOML, or a name in jobs/calibrations, such as two_cores; measure nothing"
    source.add_argument("--calibration", metavar="FILE", help=given)
    source.add_argument("--calibrate-to", metavar="FILE", help="store the measurement as JSON")
    add("--json", action="store_true", help="print one JSON object")
    return found


def main() -> None:
    """Parse the command line, plan, print; exit with 0, 1 or 2."""
    arguments = parser().parse_args()
    with ending("plan"):
        plan_and_print(arguments)


def plan_and_print(arguments: argparse.Namespace) -> None:
    """Calibrate, plan, store the plan in the run if one is given, print."""
    recipe = read_recipe(recipe_path(arguments.recipe), arguments.set)
    run_uri = normalize_uri(arguments.run) if arguments.run else None
    store = ObjectStore((run_uri,)) if run_uri else None
    workload = choose_workload(arguments, recipe, store, run_uri)
    clusters = {step: cluster_of(step, arguments, recipe.cluster) for step in STEPS}
    calibration = choose_calibration(arguments, recipe)
    plan = plan_run(workload, recipe, calibration, clusters.__getitem__)
    if store is not None and run_uri is not None:
        store_plan(store, run_uri, plan, calibration)
    print(
        json.dumps(to_json(plan, calibration)) if arguments.json else format_plan(plan, calibration)
    )


def choose_workload(
    arguments: argparse.Namespace, recipe: Recipe, store: ObjectStore | None, run_uri: str | None
) -> Workload:
    """Return the workload of the hours given, or else of the run, or else of the recipe."""
    if arguments.hours is None and store is not None and run_uri is not None:
        found = run_workload(store, run_uri, recipe.selection.hours)
        if found is not None:
            _require_defaults(arguments)
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


def _require_defaults(arguments: argparse.Namespace) -> None:
    """Raise ConfigurationError for numbers that the run has of its own."""
    names = ("labelled_hours", "dev_hours", "heldout_hours", "utterances_per_request")
    for name in names:
        if getattr(arguments, name) != parser().get_default(name):
            option = f"--{name.replace('_', '-')}"
            raise ConfigurationError(
                f"{option}: the run has its own: give --hours too, or leave it out"
            )


def choose_calibration(arguments: argparse.Namespace, recipe: Recipe) -> Calibration:
    """Read the given calibration, or measure this machine."""
    if arguments.calibration:
        return read_calibration(arguments.calibration)
    if (missing := lacking(("spark", "train"))) and not arguments.calibrate_to:
        print(
            f"plan: --calibration {TWO_CORES}; to measure this machine, {how_to_install(missing)}",
            file=sys.stderr,
        )
        return read_calibration(TWO_CORES)
    # Here, as a plan from a file measures nothing and needs no torch.
    from jobs.planning.measurement import calibrate  # noqa: PLC0415

    print("plan: calibrating on this machine", file=sys.stderr)
    calibration = calibrate(recipe, arguments.utterance_seconds)
    if arguments.calibrate_to:
        text = json.dumps(asdict(calibration), indent=1) + "\n"
        Path(arguments.calibrate_to).write_text(text, encoding="utf-8")
    return calibration


LINE_WIDTH = 100
_BYTE_UNITS = ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_MADE = ("step", "tasks", "objects", "GET", "PUT", "LIST", "requests", "read", "written")
_TAKES = ("step", "instances", "core time", "device time", "wall clock", "waits for", "cost")


def format_plan(plan: RunPlan, calibration: Calibration) -> str:
    """Format the whole plan in lines of at most 100 columns."""
    blocks = [
        _title(plan.workload),
        aligned([_MADE, *map(_made, plan.steps)]),
        aligned([_TAKES, *map(_takes, plan.steps), _sum(plan)], left=(0, 1, 5)),
        "\n".join(_totals(plan)),
        "\n".join(_grounds(plan, calibration)),
    ]
    return "\n\n".join(blocks)


def _title(workload: Workload) -> str:
    subsets = (
        f"{each.hours:,.4g} h {each.name} ({count(each.utterances)} utterances)"
        for each in workload.subsets
    )
    return textwrap.fill("Plan for " + ", ".join(subsets), LINE_WIDTH, subsequent_indent="  ")


def _made(step: StepPlan) -> list[str]:
    volume, requests = step.volume, step.volume.requests
    counts = (volume.tasks, volume.objects, requests.get, requests.put, requests.list)
    sizes = (size(volume.bytes_read), size(volume.bytes_written))
    return [step.step, *map(count, counts), dollars(step.request_dollars), *sizes]


def _takes(step: StepPlan) -> list[str]:
    cluster = f"{step.instances} x {step.instance_type}"
    hours = (_hours(step.core_seconds), _hours(step.device_seconds))
    return [
        step.step,
        cluster,
        *hours,
        duration(step.wall_seconds),
        step.bound,
        dollars(step.dollars),
    ]


def _sum(plan: RunPlan) -> list[str]:
    hours = (
        _hours(sum(step.core_seconds for step in plan.steps)),
        _hours(sum(step.device_seconds for step in plan.steps)),
    )
    wall = duration(sum(step.wall_seconds for step in plan.steps))
    return ["all steps", "", *hours, wall, "", dollars(sum(step.dollars for step in plan.steps))]


def _totals(plan: RunPlan) -> list[str]:
    kept = sum(step.volume.bytes_written for step in plan.steps)
    a_month = dollars(DOLLARS_A_GIGABYTE_MONTH * kept / 1e9)
    pipeline = plan.student_pipeline()
    cost = dollars(sum(step.dollars for step in pipeline))
    lines = [
        "Student pipeline (without alignment, baseline and teacher): "
        f"{duration(plan.days * 86_400)}, {cost}.",
        f"Kept in the store: {size(kept)}, {a_month} a month.",
    ]
    for step in plan.steps:
        if step.gets_per_s > S3_READS_PER_PREFIX_S:
            lines.append(
                f"{step.step} asks for {count(step.gets_per_s)} objects a second: what it reads "
                f"must be spread over {ceil(step.gets_per_s / S3_READS_PER_PREFIX_S)} prefixes."
            )
    for step in plan.steps:
        if step.spilled_bytes:
            disk = step.disk_gibibytes << 30
            is_short = step.spilled_bytes > disk
            remedy = ": too little, raise disk_gibibytes in its cluster file" if is_short else ""
            lines.append(
                f"{step.step} spills up to {size(step.spilled_bytes)} on each instance, whose "
                f"local disk has {size(disk)}{remedy}."
            )
    hours = plan.workload.hours(UNLABELLED)
    if not hours:
        return lines
    goal_days = PAPER_DAYS["student pipeline"] * hours / PAPER_HOURS
    goal = (
        f"The goal is the paper's 12 days for 1e6 hours, {duration(goal_days * 86_400)} for these"
    )
    if hours == PAPER_HOURS:
        parts = f"{PAPER_DAYS['data']} of data, {PAPER_DAYS['student']} of training"
        goal = f"The goal is the paper's 12 days ({parts}; 003 VIII-B1)"
    ratio = plan.days / goal_days
    speed = f"{1 / ratio:,.3g} times as fast" if ratio <= 1 else f"{ratio:,.3g} times as long"
    return [*lines, f"{goal}: {speed}."]


def _grounds(plan: RunPlan, calibration: Calibration) -> list[str]:
    core, pool = calibration.core, calibration.pool
    kinds = sorted({step.instance_type for step in plan.steps if step.device_seconds})
    measured = (
        f"selection {count(core.metadata_records_per_s)} records/s; extraction "
        f"{core.extraction_x_real_time:,.0f}, targets without the teacher "
        f"{core.targets_x_real_time:,.0f}, repartition {core.repartition_x_real_time:,.0f} x real "
        f"time; k best of {count(core.kbest_logits_per_s)} logits/s"
    )
    unplanned = ", ".join(name for name, step in STEPS.items() if step.starter == "python")
    assumed = (
        "a core of the clusters is as fast as the one measured; files and speakers come out even; "
        f"nothing fails; {SPARK_START_S:.0f} s to start a step; audio of "
        f"{size(AUDIO_BYTES_PER_HOUR)} an hour; no {unplanned}"
    )
    lines = [
        f"Measured on one core ({calibration.machine}): {measured}.",
        *(f"Devices of {kind}: {calibration.device(kind).source}." for kind in kinds),
        f"Device servers: {pool.efficiency:g} of a bare loop, {pool.source}.",
        f"Searches and sMBR on one core: {calibration.search.source}.",
        f"Assumed: {assumed}.",
        f"Store: {calibration.store.source}.",
        f"Prices: instances, the cluster files; requests, {PRICES_SOURCE}.",
    ]
    return [textwrap.fill(line, LINE_WIDTH, subsequent_indent="  ") for line in lines]


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Align rows of cells in columns of equal width, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def count(value: float) -> str:
    """Format a count in about five characters: 12, 4,321, 1.2e9."""
    return f"{value:,.0f}" if value < 1e6 else f"{value:.3g}".replace("e+0", "e").replace("e+", "e")


def size(num_bytes: float) -> str:
    """Format bytes in decimal units."""
    for factor, unit in _BYTE_UNITS:
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Format seconds as seconds, minutes, hours or days."""
    for factor, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 1.5 * factor:
            return f"{seconds / factor:.1f} {unit}"
    return f"{seconds:.1f} s"


def dollars(value: float) -> str:
    """Format dollars, with cents below a hundred."""
    return f"${value:,.0f}" if value >= 100 else f"${value:.2f}"


def _hours(seconds: float) -> str:
    if not seconds:
        return "-"
    return f"{seconds / 3600:,.0f} h" if seconds >= 36_000 else duration(seconds)


if __name__ == "__main__":
    main()
