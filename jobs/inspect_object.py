"""Show a shard, a manifest or a record, or trace an utterance.

megahour inspect runs/demo/features/unlabelled
"""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any, BinaryIO, NoReturn

from infra.log_lines import printed
from infra.settings import ConfigurationError, holds_password, printable
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
from jobs.cli.arguments import Parser
from jobs.cli.command_line import Answer, fail
from jobs.cli.record import tallies
from jobs.inspect_utterance import QUERY
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
        if holds_password(uri):
            raise ConfigurationError(f"{printable(uri)}: need a URI without a signature")
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
        description="Show what an object of a run holds: rows, columns and first rows of a shard "
        "(.parquet); counts, settings and inputs of a manifest, or of a step's folder; any other "
        "record (.json) as it is. What is no path and no URI is the id of an utterance, which "
        "is traced through the run, as inspect_utterance does. Damaged objects are refused.",
        epilog="Exit codes: 0 shown, 1 not there or damaged, 2 bad usage or recipe.",
    )
    add = parser.add_argument
    add("target", help="path or s3:// URI of a shard, a manifest or a step; or an utterance's id")
    add("--run", help="for an utterance: folder or s3:// URI that holds the run")
    add("--recipe", help="for an utterance: TOML file, or a name in jobs/recipes")
    add("--json", action="store_true", help="print one JSON object on standard output")
    return parser


def trace_utterance(arguments: argparse.Namespace) -> NoReturn:
    """Trace an utterance through a run; exit with its code."""
    if not (arguments.run and arguments.recipe):
        need = "need --run and --recipe for an utterance, or the path of an object"
        sys.exit(fail(NAME, ConfigurationError(f"{printable(arguments.target)}: {need}"), 2))
    options = ["--run", arguments.run, "--recipe", arguments.recipe]
    parsed = QUERY.parser().parse_args([*options, *(["--json"] if arguments.json else [])])
    parsed.utterance = arguments.target
    command_line.main(QUERY, parsed)


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


if __name__ == "__main__":
    main()
