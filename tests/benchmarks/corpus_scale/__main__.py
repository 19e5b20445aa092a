"""Run a corpus of many tiny utterances through every step of a run; print what each step took.

python -m tests.benchmarks.corpus_scale --out DIR --utterances N [--files F] [--form members]
python -m tests.benchmarks.corpus_scale --growth DIR/1000-segments.json DIR/10000-segments.json

The steps are those of `megahour run`, then `verify` and `inspect_utterance`, each in processes of
its own on local Spark with two cores; networks are tiny, and transcribed speech is 33 utterances.
Appends a JSON line to DIR/N-FORM.json. --growth compares the last lines of two or three such files.
The run and its corpus are removed at the end; --keep keeps them.
"""

import argparse
import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import get_args

from jobs.run_table import STEPS
from tests.benchmarks.corpus_scale.corpus import MEAN_S, Form, write_corpus
from tests.benchmarks.corpus_scale.steps import run_steps, settings
from tests.benchmarks.corpus_scale.table import HEADER, RULE, growth, row

UTTERANCES_A_FILE = 250
SHARE = 0.9
"""Of the utterances those that are selected, so that selection has to choose."""


def measure(
    out: Path, num_utterances: int, num_files: int, form: Form, last: str, keep: bool
) -> None:
    """Write the corpus, run, print the table, append the JSON line."""
    folder = out.resolve() / f"utterances-{num_utterances}-{form}"
    corpus, run = folder / "data", folder / "run"
    if run.exists():
        raise SystemExit(f"{run} is there, and would not be done again: remove it")
    if not corpus.exists():
        write_corpus(corpus, num_utterances, form)
    hours = SHARE * num_utterances * MEAN_S / 3600
    shared = settings(hours * 3600 / num_files, hours, str(corpus))
    print(f"{num_utterances:,} utterances as {form}, {num_files:,} files", HEADER, RULE, sep="\n")
    found = []
    for each in run_steps(corpus, run, num_utterances, shared, last):
        found.append(each)
        print(row(each, num_utterances), flush=True)
    line = {"utterances": num_utterances, "files": num_files, "form": form}
    with (out / f"{num_utterances}-{form}.json").open("a") as file:
        file.write(json.dumps({**line, "steps": [asdict(each) for each in found]}) + "\n")
    if not keep:
        shutil.rmtree(folder)


def main() -> None:
    """Measure one corpus, or compare several."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for the run and the JSON line")
    parser.add_argument("--utterances", type=int, default=10_000)
    parser.add_argument("--files", type=int, help="selection files; default: of 250 utterances")
    parser.add_argument("--form", choices=get_args(Form), default="segments")
    parser.add_argument("--last", choices=tuple(STEPS), default="report", help="end at this step")
    parser.add_argument("--keep", action="store_true", help="keep corpus and run")
    parser.add_argument("--growth", type=Path, nargs="+", help="compare these files' last lines")
    arguments = parser.parse_args()
    if arguments.growth:
        lines = [path.read_text().splitlines()[-1] for path in arguments.growth]
        print("\n".join(growth([json.loads(line) for line in lines])))
        return
    if arguments.out is None:
        parser.error("--out DIR, or --growth FILE FILE")
    arguments.out.mkdir(parents=True, exist_ok=True)
    num_files = arguments.files or -(-arguments.utterances // UTTERANCES_A_FILE)
    chosen = arguments.form, arguments.last, arguments.keep
    measure(arguments.out, arguments.utterances, num_files, *chosen)


if __name__ == "__main__":
    sys.exit(main())
