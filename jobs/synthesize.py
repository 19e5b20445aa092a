"""Synthesize the corpus of the demo as a Kaldi data directory.

megahour synthesize --out runs/demo-kaldi
"""

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

from jobs.cli.arguments import Parser
from jobs.synthesis.corpus import SynthesisConfig, synthesize


def main(arguments: list[str] | None = None) -> int:
    """Make the corpus; return 0 if it is complete, 1 if it cannot be made, 2 for bad values."""
    options = _parser().parse_args(arguments)
    values = {field.name: getattr(options, field.name) for field in fields(SynthesisConfig)}
    try:
        summary = synthesize(SynthesisConfig(**values), options.out, options.processes)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except (ImportError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    report = {"directory": str(options.out.absolute()), **asdict(summary)}
    if options.json:
        print(json.dumps(report, sort_keys=True))
    else:
        for name, value in report.items():
            print(f"{name}: {value}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="megahour synthesize",
        description="Synthesize spoken commands to a device at home as a Kaldi data directory, "
        "which megahour ingest reads: labelled, unlabelled and held-out speakers, in five "
        "placements of the device. The same options give the same bytes.",
        epilog="Exit codes: 0 the corpus is complete, 1 the demo extra is missing, 2 bad values.",
    )
    parser.add_argument("--out", type=Path, required=True, help="data directory to make")
    for field in fields(SynthesisConfig):
        option = f"--{field.name.replace('_', '-')}"
        default = getattr(SynthesisConfig, field.name)
        text = f"default {default}"
        parser.add_argument(option, type=type(default), default=default, metavar="N", help=text)
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
