"""Report word error rates, hours, seconds and learning curves.

megahour report --recipe demo --run runs/demo
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from infra.cluster import load_cluster
from infra.store.object_store import join_uri
from jobs.cli.catalogue import EVALUATE, REPORT
from jobs.cli.command_line import Step, StepResults, main
from jobs.cli.job import Job
from jobs.planning.comparison import compare_plan
from jobs.report_page import format_table, render_report
from pipeline.runs.commit import StepContext
from pipeline.runs.ledger import ledger_reasons
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import (
    EVALUATED_MODELS,
    EVALUATION_STEP,
    REPORT_STEP,
    STEP_RECORDS_FOLDER,
    SUBSETS,
    TARGETS_STEP,
    features_step,
    model_step,
    selection_step,
)
from pipeline.runs.step import StepContents, StepSpec, run_step
from training.shuffle_audit.certificate import read_certificate

PIPELINE = (*map(selection_step, SUBSETS), *map(features_step, SUBSETS))
READS = (EVALUATION_STEP, TARGETS_STEP, *map(model_step, EVALUATED_MODELS), *PIPELINE)


def run(job: Job) -> StepResults:
    """Build the report from the manifests of all steps; print the table.

    Each call stores the report again, so that the newest certificate and step records are in it.
    The manifest comes first: a call with other inputs than the manifest's fails before it stores.
    """
    report = build_report(job)

    def count(_: StepContext) -> StepContents:
        return StepContents.of_all(read_manifest(job.store, job.run_uri, EVALUATION_STEP).tally_out)

    result = run_step(StepSpec(job.store, job.run_uri, REPORT_STEP, {}, READS), count)
    for name, text in (
        ("report.json", json.dumps(report, indent=1, sort_keys=True) + "\n"),
        ("report.html", render_report(report)),
    ):
        job.store.put(join_uri(job.run_uri, REPORT_STEP, name), text.encode())
    print(format_table(report), file=sys.stderr if job.arguments.json else sys.stdout)
    return [result]


def build_report(job: Job) -> dict[str, Any]:
    """Collect the contents of report.json."""
    manifests = {name: read_manifest(job.store, job.run_uri, name) for name in READS}
    (evaluation,) = manifests[EVALUATION_STEP].outputs
    steps = step_records(job)
    targets = manifests[TARGETS_STEP]
    return {
        "run": job.run_uri,
        "code_version": manifests[EVALUATION_STEP].code_version,
        "recipe": steps[EVALUATE]["recipe"],
        **json.loads(read_output(job.store, job.run_uri, evaluation)),
        "hours": {s: manifests[features_step(s)].tally_out.hours for s in SUBSETS},
        "steps": {name: step_entry(record) for name, record in steps.items()},
        "plan": planned_and_actual(job, steps),
        "curves": {
            name: manifests[model_step(name)].statistics["curve"] for name in EVALUATED_MODELS
        },
        "targets": {"k": targets.config["k"], **targets.statistics},
        "certificate": read_certificate(job.store, job.run_uri),
        "quarantine": {
            name: dict(ledger_reasons(job.store, job.run_uri, manifests[name].ledgers))
            for name in PIPELINE
        },
    }


def planned_and_actual(job: Job, steps: Mapping[str, Any]) -> dict[str, Any]:
    """Compare the plan of each step with its record."""
    cluster = job.arguments.cluster or job.recipe.cluster
    return compare_plan(
        job.store, job.run_uri, job.recipe, lambda step: load_cluster(cluster or step), steps
    )


def step_records(job: Job) -> dict[str, Any]:
    """Read the summaries that the steps before this one stored, in the order of their ends."""
    uris = [found.uri for found in job.store.list(join_uri(job.run_uri, STEP_RECORDS_FOLDER))]
    records = [json.loads(job.store.get(uri)) for uri in uris]
    ordered = sorted(records, key=lambda record: record["finished_at"])
    return {record["step"]: record for record in ordered if record["step"] != REPORT}


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
    reads=READS,
    writes=(REPORT_STEP,),
    run=run,
)

if __name__ == "__main__":
    main(STEP)
