"""Trace one utterance through the steps of a run.

megahour inspect_utterance --recipe demo --run runs/demo --utterance ID
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from jobs.cli.command_line import Answer, Query, main
from jobs.cli.job import Job
from jobs.run_table import utterance_reads
from pipeline.audit.trace import StepTrace, Trace, run_that_selected, trace


def inspect(job: Job) -> Answer:
    """Trace the utterance; ValueError if the run does not know it."""
    wanted, reads = job.arguments.utterance, utterance_reads(job.recipe)
    # Of a chain, the run that selected the utterance has all of its objects.
    run_uri = run_that_selected(job.store, job.run_uri, job.corpus_uri, wanted)
    found = trace(job.store, run_uri, job.corpus_uri, wanted, reads)
    by = f"selected by {run_uri}, which {job.run_uri} extends\n" if run_uri != job.run_uri else ""
    document = {"step": "inspect_utterance", "run": run_uri, **asdict(found)}
    return Answer(True, by + describe(found), document)


def describe(found: Trace) -> str:
    """Format the trace as a small tree."""
    lines = [found.utterance_id]
    for step in found.steps:
        lines += branch(step)
    lines += ["audio", *leaves(found.audio)] if found.audio else []
    lines += ["models", *leaves(found.models)] if found.models else []
    return "\n".join([lines[0], *(f"  {line}" for line in lines[1:])])


def branch(step: StepTrace) -> list[str]:
    """Format one step: the outcome, the object, the configuration and the code."""
    lines = [f"{step.step}: {step.outcome}"]
    if step.object:
        unit = "row" if step.object.endswith(".parquet") else "line"
        lines.append(f"  {step.object}, {unit} {step.position}")
    if step.config_digest:
        made_by = f"config {step.config_digest[:12]}, megahour {step.code_version}"
        lines.append(f"  {made_by}")
    return [*lines, *leaves(step.facts)]


def leaves(facts: Mapping[str, Any]) -> list[str]:
    """Format names and values, one a line."""
    return [f"  {name:<20} {value}" for name, value in facts.items()]


QUERY = Query(
    name="inspect_utterance",
    description="Trace one utterance through a run: its metadata line, why it was selected or not, "
    "its selection file, the ETag of its audio then and now, its shards and rows of features and "
    "targets, its training partition, and the models trained on it. Each step is shown with its "
    "configuration and code. The query reads ids, not tensors.",
    exit_codes="0 found, 1 unknown to the run or failed, 2 bad usage or recipe.",
    answer=inspect,
)

if __name__ == "__main__":
    parser = QUERY.parser()
    parser.add_argument("--utterance", required=True, metavar="ID", help="id of the utterance")
    main(QUERY, parser.parse_args())
