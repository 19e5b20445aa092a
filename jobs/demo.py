"""The demo: a synthetic corpus, then every step of the system on it, ending in a report.

python -m jobs.demo --run runs/demo
"""

import argparse
import sys
from pathlib import Path

from infra.store.uris import is_s3
from jobs.run import Launch, add_run_arguments, launches, run_steps, shared_arguments
from jobs.synthesis.plan import SynthesisConfig


def main() -> None:
    """Synthesize the corpus as a Kaldi data directory and run all steps on it."""
    defaults = SynthesisConfig()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="demo", help="TOML file, or a name in jobs/recipes")
    add_run_arguments(parser)
    parser.add_argument("--labelled-hours", type=float, default=defaults.labelled_hours)
    parser.add_argument("--unlabelled-hours", type=float, default=defaults.unlabelled_hours)
    parser.add_argument("--kaldi-dir", help="where the corpus is made; default: beside the run")
    arguments = parser.parse_args()
    if is_s3(arguments.run) and not arguments.kaldi_dir:
        parser.error("--run is in S3: say with --kaldi-dir where the corpus is to be made")
    directory = arguments.kaldi_dir or f"{Path(arguments.run)}-kaldi"
    sys.exit(make_and_run(arguments, directory))


def make_and_run(arguments: argparse.Namespace, directory: str) -> int:
    """Make the corpus, run the steps, and say where the report is."""
    synthesis = Launch(
        "synthesize",
        (sys.executable,),
        (
            f"--labelled-hours={arguments.labelled_hours}",
            f"--unlabelled-hours={arguments.unlabelled_hours}",
        ),
    )
    code = run_steps([synthesis], ["--out", directory])
    steps = launches(directory, arguments.supervised_ranks, arguments.student_ranks)
    code = code or run_steps(steps, shared_arguments(arguments.recipe, arguments))
    if not code:
        print(f"report: {arguments.run}/report/report.html")
    return code


if __name__ == "__main__":
    main()
