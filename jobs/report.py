"""Report word error rates, hours, seconds and learning curves.

megahour report --recipe demo --run runs/demo
megahour report --recipe demo --run runs/20h --curve runs/1h runs/5h
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from infra.cluster import load_cluster
from infra.store.checked_reads import read_checked
from infra.store.object_store import ObjectStore, join_uri, normalize_uri
from jobs.cli.catalogue import EVALUATE, REPORT
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.planning.comparison import compare_plan
from jobs.report_page import format_table, hours_point, render_report
from pipeline.runs.commit import StepContext
from pipeline.runs.ledger import ledger_reasons
from pipeline.runs.manifest import (
    Manifest,
    Output,
    is_finished,
    read_manifest,
    read_output,
    subsets_of_run,
)
from pipeline.runs.names import (
    CERTIFICATE_STEP,
    DEV,
    EVALUATED_MODELS,
    EVALUATION_SCORES,
    EVALUATION_STEP,
    FEATURES_FOLDER,
    KBEST_COSTS_STEP,
    MODELS_FOLDER,
    REPORT_DOCUMENT,
    REPORT_PAGE,
    REPORT_STEP,
    SELECTION_FOLDER,
    STEP_RECORDS_FOLDER,
    SUBSETS,
    TARGETS_FOLDER,
    TARGETS_STEP,
    TEACHER,
    evaluated_models,
    features_step,
    folder_of,
    job_record,
    model_step,
    selection_step,
    targets_rounds,
)
from pipeline.runs.sealed_json import NamedObject, naming, seal, unseal
from pipeline.runs.step import StepContents, StepSpec, run_step, store_again
from training.recipes import Recipe

PIPELINE = (*map(selection_step, SUBSETS), *map(features_step, SUBSETS))
READS = (EVALUATION_STEP, TARGETS_STEP, *map(model_step, EVALUATED_MODELS), *PIPELINE)
"""The steps that every report reads, but for the teacher where it is the user's own."""
OPTIONAL_READS = (selection_step(DEV), features_step(DEV))


def run(job: Job) -> StepResults:
    """Build the report from the manifests of all steps; print the table.

    Each call stores the report again, so that the newest certificate and step records are in it.
    The manifest comes first: a call with other inputs than the manifest's fails before it stores.
    """
    report = build_report(job)
    if job.arguments.curve:
        report["hours_curve"] = [hours_point(each) for each in (report, *other_reports(job))]

    def count(_: StepContext) -> StepContents:
        return StepContents.of_all(read_manifest(job.store, job.run_uri, EVALUATION_STEP).tally_out)

    reads = required_reads(job.recipe)
    result = run_step(StepSpec(job.store, job.run_uri, REPORT_STEP, {}, reads), count)
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
    optional = OPTIONAL_READS if DEV in subsets else ()
    # The evaluation's inputs name the tuning and the models trained on by sMBR, so its digest is
    # theirs, too.
    rounds = (each.targets for each in targets_rounds(recipe.targets.rounds))
    read = dict.fromkeys((*required_reads(recipe), *rounds, *optional, *map(model_step, models)))
    manifests = {name: read_manifest(job.store, job.run_uri, name) for name in read}
    evaluation = scores_of(manifests[EVALUATION_STEP])
    steps = step_records(job)
    if EVALUATE not in steps:
        record = join_uri(job.run_uri, job_record(EVALUATE))
        raise ValueError(f"{record} is missing: run megahour {EVALUATE} again, which stores it")
    targets = manifests[TARGETS_STEP]
    return {
        "run": job.run_uri,
        "code_version": manifests[EVALUATION_STEP].code_version,
        "recipe": steps[EVALUATE]["recipe"],
        **json.loads(read_output(job.store, job.run_uri, evaluation)),
        "hours": {s: manifests[features_step(s)].tally_out.hours for s in subsets},
        "steps": {name: step_entry(record) for name, record in steps.items()},
        "plan": planned_and_actual(job, steps),
        "curves": {name: manifests[model_step(name)].statistics["curve"] for name in models},
        "targets": {
            "k": targets.config["k"],
            "offsets": targets.config.get("offsets", "one"),
            "source": targets.config.get("source", "logits"),
            "tail_samples": targets.config.get("tail_samples", 0),
            # A teacher of the user's own is no model of the run.
            "num_teachers": sum(folder_of(name) == MODELS_FOLDER for name in targets.inputs)
            or recipe.num_labelling,
            **targets.statistics,
        },
        "kbest_costs": kbest_costs(job),
        "device_faults": device_faults(steps),
        "certificate": certificate(job),
        "quarantine": quarantine_reasons(job, manifests),
    }


def quarantine_reasons(job: Job, manifests: Mapping[str, Manifest]) -> dict[str, dict[str, int]]:
    """Count the reasons of the ledgers of selections, features and targets."""
    return {
        name: dict(ledger_reasons(job.store, job.run_uri, manifest.ledgers))
        for name, manifest in manifests.items()
        if folder_of(name) in (SELECTION_FOLDER, FEATURES_FOLDER, TARGETS_FOLDER)
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
    return [step for step in READS if recipe.num_teachers or step != model_step(TEACHER)]


def kbest_costs(job: Job) -> dict[str, Any]:
    """Return what the targets' k costs, where the run was evaluated with that."""
    if not is_finished(job.store, job.run_uri, KBEST_COSTS_STEP):
        return {}
    return dict(read_manifest(job.store, job.run_uri, KBEST_COSTS_STEP).statistics)


def other_reports(job: Job) -> Iterator[Mapping[str, Any]]:
    """Yield the reports of the runs that `--curve` names."""
    for given in job.arguments.curve:
        run_uri = normalize_uri(given)
        store = ObjectStore(job.cluster.readable(run_uri, run_uri))
        remedy = f"run megahour report --run {given} again"
        uri = join_uri(run_uri, REPORT_DOCUMENT)
        yield read_checked(store, uri, lambda data, remedy=remedy: unseal(data, remedy))


def scores_of(evaluation: Manifest) -> Output:
    """Return the evaluation's output that holds its scores."""
    names = {output.key.rpartition("/")[2]: output for output in evaluation.outputs}
    return next(
        output for name, output in names.items() if name.startswith(f"{EVALUATION_SCORES}-")
    )


def planned_and_actual(job: Job, steps: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the plan of each step with its record."""
    cluster = job.arguments.cluster or job.recipe.cluster
    return compare_plan(
        job.store, job.run_uri, job.recipe, lambda step: load_cluster(cluster or step), steps
    )


def step_records(job: Job) -> dict[str, Any]:
    """Read the summaries that the steps before this one stored, in the order of their ends."""
    own = join_uri(job.run_uri, job_record(REPORT))
    listed = job.store.list(join_uri(job.run_uri, STEP_RECORDS_FOLDER))
    records = [_read_record(job, found.uri) for found in listed if found.uri != own]
    return {record["step"]: record for record in sorted(records, key=lambda r: r["finished_at"])}


def _read_record(job: Job, uri: str) -> dict[str, Any]:
    step = uri.rpartition("/")[2].removesuffix(".json")
    remedy = f"run megahour {step} again, which stores the record again"
    return read_checked(job.store, uri, lambda data: unseal(data, remedy))


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
    "report/report.html.",
    reads=(*READS, *OPTIONAL_READS),
    run=run,
)


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
    return parser.parse_args()


if __name__ == "__main__":
    main(STEP, parsed())
