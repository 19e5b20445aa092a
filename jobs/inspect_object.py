"""Show a shard, a manifest or a record, or trace an utterance.

megahour inspect runs/demo/features/unlabelled
megahour inspect ID --recipe demo --run runs/demo
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, BinaryIO, NoReturn

from infra.log_lines import printed
from infra.settings import ConfigurationError, printable
from infra.store.object_store import (
    ObjectNotFound,
    ObjectStore,
    PrefixError,
    StoreError,
    join_uri,
    normalize_uri,
    scan_checked,
)
from infra.store.uris import is_s3
from jobs.cli import command_line
from jobs.cli.arguments import (
    Parser,
    add_cluster_arguments,
    add_log_argument,
    add_recipe_arguments,
    require_no_passwords,
)
from jobs.cli.command_line import Answer, Query, fail
from jobs.cli.job import Job
from jobs.cli.record import tallies
from jobs.run_table import utterance_reads
from pipeline.audit.trace import StepTrace, Trace, run_that_selected, trace
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import MANIFEST_FILE
from pipeline.runs.sealed_json import unseal
from pipeline.shards.container import read_first_rows

NAME = "inspect"
NUM_ROWS = 3
"""Rows of a shard that are shown."""

SHARD, RECORD = ".parquet", ".json"


def main() -> None:
    """Parse the command line, show what is at the argument, exit with 0, 1 or 2."""
    arguments = _parser().parse_args()
    target = arguments.target
    # An id has no slash, and no ending of an object.
    if not (is_s3(target) or "/" in target or target.endswith((SHARD, RECORD))):
        trace_utterance(arguments)
    try:
        uri = normalize_uri(target)
        require_no_passwords([uri])
        answer = inspect_object(ObjectStore((uri,)), uri)
    except (ConfigurationError, PrefixError) as error:
        sys.exit(fail(NAME, error, 2))
    except (OSError, StoreError, ValueError) as error:
        sys.exit(fail(NAME, error, 1))
    print(json.dumps(answer.document) if arguments.json else printed(answer.text), flush=True)
    sys.exit(0)


def _parser() -> Parser:
    parser = Parser(
        prog=f"megahour {NAME}",
        description=QUERY.description,
        epilog=f"Exit codes: {QUERY.exit_codes}",
    )
    add = parser.add_argument
    add("target", help="path or s3:// URI of a shard, a manifest or a step; or an utterance's id")
    add_recipe_arguments(parser, default="")
    add("--run", help="for an utterance: folder or s3:// URI that holds the run")
    add_cluster_arguments(parser)
    add("--json", action="store_true", help="print one JSON object on standard output")
    add_log_argument(parser)
    return parser


def trace_utterance(arguments: argparse.Namespace) -> NoReturn:
    """Trace an utterance through a run; exit with its code."""
    if not (arguments.run and arguments.recipe):
        need = "need --run and --recipe for an utterance, or the path of an object"
        sys.exit(fail(NAME, ConfigurationError(f"{printable(arguments.target)}: {need}"), 2))
    command_line.main(QUERY, arguments)


def answer_trace(job: Job) -> Answer:
    """Trace the utterance; ValueError if the run does not know it."""
    wanted, reads = job.arguments.target, utterance_reads(job.recipe)
    # Of a chain, the run that selected the utterance has all of its objects.
    run_uri = run_that_selected(job.store, job.run_uri, job.corpus_uri, wanted)
    found = trace(job.store, run_uri, job.corpus_uri, wanted, reads)
    by = f"selected by {run_uri}, which {job.run_uri} extends\n" if run_uri != job.run_uri else ""
    return Answer(True, by + describe(found), {"step": NAME, "run": run_uri, **asdict(found)})


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


def inspect_object(store: ObjectStore, uri: str) -> Answer:
    """Describe an object by its ending; a folder by the manifest of its step."""
    if uri.endswith(SHARD):
        document = scan_checked(store, uri, shard_facts)
    elif uri.endswith(RECORD):
        document = record_facts(uri, store.get(uri))
    else:
        manifest = join_uri(uri, MANIFEST_FILE)
        try:
            document = record_facts(manifest, store.get(manifest))
        except ObjectNotFound as error:
            raise ValueError(
                f"{printable(uri)}: no manifest is there: name a shard (*{SHARD}), a record "
                f"(*{RECORD}), or the folder of a finished step, such as RUN/features/unlabelled"
            ) from error
    return Answer(True, "\n".join([uri, *_lines(document)]), {"uri": uri, **document})


def shard_facts(file: BinaryIO) -> dict[str, Any]:
    """Return a shard's rows, columns and first rows; long cells are given by their sizes."""
    metadata, first = read_first_rows(file, NUM_ROWS)
    rows = first.to_pylist()
    return {
        "kind": "shard",
        "rows": metadata.num_rows,
        "row_groups": metadata.num_row_groups,
        "columns": {each.name: str(each.type) for each in first.schema},
        "first_rows": [{name: _short(cell) for name, cell in row.items()} for row in rows],
    }


def _short(cell: object) -> object:
    if isinstance(cell, bytes):
        return f"{len(cell):,} bytes"
    if isinstance(cell, list) and len(cell) > NUM_ROWS:
        return f"{len(cell):,} values"
    return cell


def record_facts(uri: str, data: bytes) -> dict[str, Any]:
    """Return a manifest's counts, settings and inputs, or all that another record says."""
    if not uri.endswith(f"/{MANIFEST_FILE}"):
        return {"kind": "record", **unseal(data, "run its step again")}
    found = Manifest.from_bytes(data)
    # The lists of a large step lie in parts, which this store may not reach.
    is_whole = isinstance(found.outputs, tuple)
    size = {"bytes": sum(each.num_bytes for each in found.outputs)} if is_whole else {}
    return {
        "kind": "manifest",
        "made": found.step,
        "tallies": tallies(found),
        "not_selected": asdict(found.unselected),
        "objects": len(found.outputs),
        **(size or {"parts": len(found.parts)}),
        "config": dict(found.config),
        "inputs": dict(found.inputs),
        "versions": dict(found.versions),
        "statistics": dict(found.statistics),
    }


def _lines(document: Any, indent: str = "  ") -> list[str]:  # noqa: ANN401 - as JSON has it
    """Format nested tables as indented lines."""
    lines = []
    for key, value in document.items():
        name = printable(str(key))  # a line of its own would be another fact
        if isinstance(value, dict) and value:
            lines += [f"{indent}{name}", *_lines(value, f"{indent}  ")]
        else:
            text = json.dumps(value, ensure_ascii=False)
            lines.append(f"{indent}{name:<24} {text if len(text) < 200 else text[:197] + '...'}")
    return lines


QUERY = Query(
    name=NAME,
    description="Show what an object of a run holds: rows, columns and first rows of a shard "
    "(.parquet); counts, settings and inputs of a manifest, or of a step's folder; any other "
    "record (.json) as it is. Damaged objects are refused. What is no path and no URI is the id of "
    "an utterance, which is traced through a run: its metadata line, why it was selected or not, "
    "its selection file, the ETag of its audio then and now, its shards and rows of features and "
    "targets, its training partition, and the models trained on it. Each step is shown with its "
    "configuration and code. This reads ids, not tensors.",
    exit_codes="0 shown, 1 not there, damaged or unknown to the run, 2 bad usage or recipe.",
    answer=answer_trace,
)

if __name__ == "__main__":
    main()
