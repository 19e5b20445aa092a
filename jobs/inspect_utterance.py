"""Say where one utterance went: metadata, selection, features, targets, partitions, models.

python -m jobs.inspect_utterance --recipe demo --run runs/demo --utterance ID
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from jobs.cli.command_line import Job
from jobs.cli.queries import Answer, Query, main
from pipeline.audit.trace import Lineage, Sighting, trace


def inspect(job: Job) -> Answer:
    """Trace the utterance; an unknown one is an error."""
    found = trace(job.store, job.run_uri, job.corpus_uri, job.arguments.utterance)
    return Answer(True, describe(found), {"step": "inspect_utterance", **asdict(found)})


def describe(found: Lineage) -> str:
    """A small tree."""
    lines = [found.utterance_id]
    for sighting in found.sightings:
        lines += branch(sighting)
    lines += ["audio", *leaves(found.audio)] if found.audio else []
    lines += ["models", *leaves(found.models)] if found.models else []
    return "\n".join([lines[0], *(f"  {line}" for line in lines[1:])])


def branch(sighting: Sighting) -> list[str]:
    """One sighting: what became of it, where, and by which configuration and code."""
    lines = [f"{sighting.step}: {sighting.outcome}"]
    if sighting.object:
        unit = "row" if sighting.object.endswith(".parquet") else "line"
        lines.append(f"  {sighting.object}, {unit} {sighting.position}")
    if sighting.config_digest:
        made_by = f"config {sighting.config_digest[:12]}, megahour {sighting.code_version}"
        lines.append(f"  {made_by}")
    return [*lines, *leaves(sighting.facts)]


def leaves(facts: Mapping[str, Any]) -> list[str]:
    """Names and values."""
    return [f"  {name:<20} {value}" for name, value in facts.items()]


QUERY = Query(
    name="inspect_utterance",
    description="Say where one utterance went: metadata line, selected or not and why, selection "
    "file, audio with the ETag then and now, shards and rows of features and targets, training "
    "partition, the configuration and code of each step, the models that were trained on it. "
    "Reads ids, not tensors.",
    epilog="Exit codes: 0 found, 1 unknown to the run or failed, 2 bad usage or recipe.",
    answer=inspect,
)

if __name__ == "__main__":
    parser = QUERY.parser()
    parser.add_argument("--utterance", required=True, metavar="ID", help="the utterance's id")
    main(QUERY, parser)
