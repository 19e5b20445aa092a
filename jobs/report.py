"""Report word error rates, hours, seconds and learning curves.

megahour report --recipe demo --run runs/demo
megahour report --recipe demo --run runs/20h --curve runs/1h runs/5h
megahour report --recipe demo --run runs/new --compare runs/old
megahour report --recipe demo --run runs/mine --oracle runs/oracle
"""

import argparse
import json
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from infra.cluster import load_cluster
from infra.store.object_store import ObjectStore, join_uri, read_checked
from jobs.cli.catalogue import EVALUATE, READS, REPORT
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.planning.stored_plan import compare_plan
from jobs.report_page import format_table, hours_point, render_report
from jobs.report_page.collect import (
    OtherReport,
    comparison,
    ingests_of,
    origin_of,
    other_ledger_steps,
    other_uris,
    output_of,
    quarantine_reasons,
    record_uris,
    recovered,
    report_spec,
    retry_commands,
    run_report,
    waterfall_of,
)
from pipeline.audit.job_records import parse_job_record
from pipeline.runs.manifest import (
    Manifest,
    is_finished,
    read_manifest,
    read_output,
    store_again,
    subsets_of_run,
)
from pipeline.runs.names import (
    CERTIFICATE_STEP,
    DEV,
    EVALUATION_SCORES,
    EVALUATION_STEP,
    KBEST_COSTS_STEP,
    MODELS_FOLDER,
    REPORT_DOCUMENT,
    REPORT_PAGE,
    TARGETS_STEP,
    TEACHER,
    TUNING_STEP,
    evaluated_models,
    features_step,
    folder_of,
    job_record,
    model_step,
    selection_step,
    targets_rounds,
)
from pipeline.runs.sealed_json import NamedObject, naming, seal
from pipeline.steps.targets import MEAN_MASS
from training.settings.recipe import Recipe

OPTIONAL_READS = (selection_step(DEV), features_step(DEV))
REQUIRED_READS = tuple(step for step in READS[REPORT] if step not in OPTIONAL_READS)
"""The steps that every report reads, but for the teacher where it is the user's own."""


class CurvePoint(TypedDict):
    """CurvePoint holds what the page shows of a sub-epoch; training wrote more."""

    labelled: bool
    learning_rate: float
    num_frames: int
    cross_entropy: float
    frame_accuracy: float
    validation_cross_entropy: NotRequired[float]
    trainer: NotRequired[dict[str, float]]


def run(job: Job) -> StepResults:
    """Build the report from manifests and records; print the table.

    A call after a change of any input, such as a later plan or certificate, replaces the report.
    Any other call stores it again, so that a damaged one is whole.
    """
    others = {uri: OtherReport.read(job, uri) for uri in other_uris(job)}
    digests = {other.uri: other.sha256 for other in others.values()}
    reads = (*required_reads(job.recipe), *other_ledger_steps(job.store, job.run_uri, job.recipe))
    spec = report_spec(job.store, job.run_uri, reads, digests)
    report = build_report(job)
    if job.arguments.curve:
        curve = (others[uri].document for uri in job.arguments.curve)
        report["hours_curve"] = [hours_point(each) for each in (report, *curve)]
    if job.arguments.compare:
        report["comparison"] = comparison(job, others[job.arguments.compare])
    if job.arguments.oracle:
        report["oracle"] = recovered(job, others[job.arguments.oracle], report["hours"])
    tally = read_manifest(job.store, job.run_uri, EVALUATION_STEP).tally_out
    result = run_report(spec, tally)
    page = render_report(report).encode()
    document = {**report, "inputs": dict(result.manifest.inputs)}
    sealed = seal(naming(document, [NamedObject.of(REPORT_PAGE, page)]), indent=1)
    for key, data in ((REPORT_PAGE, page), (REPORT_DOCUMENT, sealed)):
        store_again(job.store, join_uri(job.run_uri, key), data)
    print(format_table(report), file=sys.stderr if job.arguments.json else sys.stdout)
    return [result]


def build_report(job: Job) -> dict[str, Any]:
    """Collect the contents of report.json."""
    recipe = job.recipe
    models = evaluated_models(
        recipe.sequence_training.models, recipe.num_teachers, recipe.targets.rounds
    )
    subsets = subsets_of_run(job.store, job.run_uri, features_step)
    manifests = manifests_of(job, subsets, models)
    bases = job.increment.bases if job.increment else ()
    ingests = ingests_of(job.store, (*reversed(bases), job.run_uri))
    evaluation = output_of(manifests[EVALUATION_STEP], EVALUATION_SCORES)
    steps = step_records(job)
    if EVALUATE not in steps:
        record = join_uri(job.run_uri, job_record(EVALUATE))
        raise ValueError(f"{record} is missing: run megahour {EVALUATE} again, which stores it")
    return {
        "run": job.run_uri,
        "code_version": manifests[EVALUATION_STEP].code_version,
        "recipe": steps[EVALUATE]["recipe"],
        **json.loads(read_output(job.store, job.run_uri, evaluation)),
        "development": development_errors(job.store, job.run_uri),
        "hours": {s: manifests[features_step(s)].tally_out.hours for s in subsets},
        "steps": {name: step_entry(record) for name, record in steps.items()},
        "origin": origin_of(steps, job.run_uri),
        **({"extends": list(bases)} if bases else {}),
        "waterfall": waterfall_of(job.store, job.run_uri, ingests.values()),
        "plan": planned_and_actual(job, steps),
        "curves": {
            name: manifests[model_step(name)].statistic("curve", list[CurvePoint])
            for name in models
        },
        "targets": targets_facts(manifests[TARGETS_STEP], recipe),
        "kbest_costs": kbest_costs(job),
        "device_faults": device_faults(steps),
        "certificate": certificate(job),
        "quarantine": (lost := quarantine_reasons(manifests, ingests.values())),
        "retries": retry_commands(lost, job.run_uri, job.arguments.recipe, job.arguments.set),
        "pace": {
            model: pace
            for record in steps.values()
            for model, pace in record.get("pace", {}).items()
        },
    }


def manifests_of(job: Job, subsets: Collection[str], models: Sequence[str]) -> dict[str, Manifest]:
    """Read the manifests of all steps that a report shows, by step."""
    optional = OPTIONAL_READS if DEV in subsets else ()
    # The evaluation's inputs name the tuning and the models trained on by sMBR, so its digest is
    # theirs, too.
    rounds = (each.targets for each in targets_rounds(job.recipe.targets.rounds))
    others = other_ledger_steps(job.store, job.run_uri, job.recipe)
    read = (*required_reads(job.recipe), *others, *rounds, *optional, *map(model_step, models))
    return {step: read_manifest(job.store, job.run_uri, step) for step in dict.fromkeys(read)}


def targets_facts(targets: Manifest, recipe: Recipe) -> dict[str, Any]:
    """Return k and the form of the targets, how many teachers made them, and their statistics."""
    return {
        "k": targets.config["k"],
        "offsets": targets.config.get("offsets", "one"),
        "source": targets.config.get("source", "logits"),
        "tail_samples": targets.config.get("tail_samples", 0),
        # A teacher of the user's own is no model of the run.
        "num_teachers": sum(folder_of(name) == MODELS_FOLDER for name in targets.inputs)
        or recipe.num_labelling,
        **targets.statistics,
        "num_frames": targets.statistic("num_frames", int),
        MEAN_MASS: targets.statistic(MEAN_MASS, float),
    }


def certificate(job: Job) -> dict[str, Any]:
    """Return the certificate of the run's order, {} where there is none."""
    if not is_finished(job.store, job.run_uri, CERTIFICATE_STEP):
        return {}
    return dict(read_manifest(job.store, job.run_uri, CERTIFICATE_STEP).statistics)


def device_faults(steps: Mapping[str, Any]) -> dict[str, Any]:
    """Return the faults of devices in the steps' records, where there are some."""
    found = {name: record.get("device_faults", []) for name, record in steps.items()}
    return {name: faults for name, faults in found.items() if faults}


def required_reads(recipe: Recipe) -> list[str]:
    """Return the steps that a report reads in any case: no teacher where none is trained."""
    return [step for step in REQUIRED_READS if recipe.num_teachers or step != model_step(TEACHER)]


def kbest_costs(job: Job) -> dict[str, Any]:
    """Return what the targets' k costs, where the run was evaluated with that."""
    if not is_finished(job.store, job.run_uri, KBEST_COSTS_STEP):
        return {}
    return dict(read_manifest(job.store, job.run_uri, KBEST_COSTS_STEP).statistics)


def planned_and_actual(job: Job, steps: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the plan of each step with its record."""
    cluster = job.arguments.cluster or job.recipe.cluster
    return compare_plan(
        job.store, job.run_uri, job.recipe, lambda step: load_cluster(cluster or step), steps
    )


def step_records(job: Job) -> dict[str, Any]:
    """Read the summaries that the steps before this one stored, in the order of their ends."""
    records = [_read_record(job, uri) for uri in record_uris(job.store, job.run_uri)]
    return {record["step"]: record for record in sorted(records, key=lambda r: r["finished_at"])}


def _read_record(job: Job, uri: str) -> dict[str, Any]:
    step = uri.rpartition("/")[2].removesuffix(".json")
    remedy = f"run megahour {step} again, which stores the record again"
    return read_checked(job.store, uri, lambda data: parse_job_record(data, remedy))


def step_entry(record: dict[str, Any]) -> dict[str, Any]:
    """Sum the counts of one step over all its manifests; its seconds beside them."""
    tallies = record["manifests"].values()
    counts = ("utterances_in", "utterances_out", "quarantined")
    totals = {name: sum(tally[name] for tally in tallies) for name in counts}
    return {"seconds": record["seconds"], **totals}


STEP = Step(
    name=REPORT,
    description="Gather word error rates by placement, hours, counts, seconds and learning curves "
    "of a run. Write them as report/report.json and as one self-contained page, "
    "report/report.html. Give it again after a later plan, certificate or step: the newest report "
    "replaces the one before.",
    run=run,
)


def development_errors(store: ObjectStore, run_uri: str) -> dict[str, Mapping[str, Any]]:
    """Return each model's counts and rate as it was chosen; {} without development speakers."""
    if not is_finished(store, run_uri, TUNING_STEP):
        return {}
    tuning = read_manifest(store, run_uri, TUNING_STEP)
    chosen = tuning.statistic("settings", dict[str, dict[str, Any]])
    (output,) = tuning.outputs
    curves = json.loads(read_output(store, run_uri, output))
    return {
        name: next(point["word_errors"] for point in curves[name] if point["settings"] == settings)
        for name, settings in chosen.items()
    }


def parsed() -> argparse.Namespace:
    """Read the command line."""
    parser = STEP.parser()
    parser.add_argument(
        "--curve",
        nargs="+",
        default=[],
        metavar="RUN",
        help="reported runs of other hours of unlabelled speech: draw word error rates by hours",
    )
    parser.add_argument(
        "--compare",
        metavar="RUN",
        help="a reported run: set its rates, hours, seconds and settings beside this run's, and "
        "test the difference of each model's errors over the same speakers. Choose a recipe by the "
        "development speakers' rates, so that no held-out speaker has a part in it",
    )
    parser.add_argument(
        "--oracle",
        metavar="RUN",
        help="a reported run of the same held-out utterances, whose labelled speakers are this "
        "run's and the unlabelled ones, transcribed: show its baseline's word error rates, and the "
        "share of that baseline's gain that teacher and student recover, with intervals over "
        "speakers. docs/tutorial.md says how to make one",
    )
    return parser.parse_args()


if __name__ == "__main__":
    main(STEP, parsed())
