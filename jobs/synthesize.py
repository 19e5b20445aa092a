"""Make the demo's corpus: `python -m jobs.synthesize --out DIR`, a Kaldi data directory."""

import argparse
import json
import sys
from dataclasses import asdict, fields
from pathlib import Path

from jobs.synthesis.corpus import synthesize
from jobs.synthesis.plan import SynthesisConfig


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 when the corpus is there, 1 if it cannot be made, 2 for bad values."""
    options = _parser().parse_args(arguments)
    values = {field.name: getattr(options, field.name) for field in fields(SynthesisConfig)}
    try:
        summary = synthesize(SynthesisConfig(**values), options.out, options.processes)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except ImportError as error:
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
    parser = argparse.ArgumentParser(prog="python -m jobs.synthesize", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the data directory to be made")
    for field in fields(SynthesisConfig):
        option = f"--{field.name.replace('_', '-')}"
        default = getattr(SynthesisConfig, field.name)
        parser.add_argument(option, type=type(default), default=default, help=f"({default})")
    parser.add_argument("--processes", type=int, default=2, help="processes at once (2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


if __name__ == "__main__":
    sys.exit(main())
