"""Make a synthetic corpus and run every step on it, to a report.

megahour demo --run runs/demo
"""

import argparse
import sys

from infra.log_lines import begin_log
from infra.store.uris import is_s3, normalize_uri
from jobs.cli.arguments import (
    DEV_SHARE,
    KALDI_DIR,
    ON_CPU,
    Parser,
    add_recipe_arguments,
    add_run_arguments,
    given_options,
    recipe_path,
)
from jobs.run import EXIT_CODES, Launch, check, exit_with, launches_of, run_chosen, run_steps
from jobs.run_table import REPORT
from jobs.synthesis.corpus import SynthesisConfig
from pipeline.runs.names import REPORT_STEP
from training.settings.recipe import read_recipe


def main() -> None:
    """Synthesize the corpus as a Kaldi data directory and run all steps on it."""
    arguments = _parse_arguments()
    begin_log("demo", arguments.log_format)
    exit_with(lambda: make_and_run(arguments))


def _parse_arguments() -> argparse.Namespace:
    defaults = SynthesisConfig()
    parser = Parser(
        prog="megahour demo",
        description="Make a synthetic corpus, then run every step of the system on it, to word "
        "error rates and a report. The same command resumes an interrupted demo.",
        epilog=EXIT_CODES,
    )
    add_recipe_arguments(parser, default="demo")
    # Models of a minute's training, on two and four ranks: a host has rarely as many GPUs.
    add_run_arguments(parser, device=ON_CPU)
    for subset in ("labelled", "unlabelled"):
        hours = getattr(defaults, f"{subset}_hours")
        parser.add_argument(
            f"--{subset}-hours",
            type=float,
            default=hours,
            metavar="HOURS",
            help=f"{subset} speech to synthesize, default {hours:g}",
        )
    parser.add_argument(
        "--kaldi-dir", help="folder in which to make the corpus; default: RUN-kaldi"
    )
    arguments = parser.parse_args()
    if is_s3(arguments.run) and not arguments.kaldi_dir:
        parser.error(f"--run {arguments.run} is in S3: give --kaldi-dir a local folder")
    arguments.kaldi_dir = arguments.kaldi_dir or f"{normalize_uri(arguments.run)}-kaldi"
    return arguments


def make_and_run(arguments: argparse.Namespace) -> int:
    """Make the corpus, run the steps, and print where the report is."""
    synthesis = Launch(
        "synthesize",
        (sys.executable,),
        (
            f"--labelled-hours={arguments.labelled_hours}",
            f"--unlabelled-hours={arguments.unlabelled_hours}",
        ),
    )
    code = check(arguments)
    if not code and not arguments.dry_run:
        code = run_steps([synthesis], ["--out", arguments.kaldi_dir])
    if not code:
        recipe = read_recipe(recipe_path(arguments.recipe), arguments.set)
        ingested = [KALDI_DIR, arguments.kaldi_dir, *given_options(arguments, [DEV_SHARE])]
        code = run_chosen(launches_of(arguments, recipe, ingested), arguments)
    if not code and not arguments.dry_run and REPORT in (arguments.only or [REPORT]):
        print(f"report: {arguments.run}/{REPORT_STEP}/report.html")
    return code


if __name__ == "__main__":
    main()
