"""Run every step on a Kaldi data directory, to word error rates.

megahour run --recipe recorded --run runs/mine --kaldi-dir /data/mine
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.spark.session import spark_environment
from jobs.cli.catalogue import INGEST, STEPS, TRAIN_STUDENT

JOBS = Path(__file__).parent


@dataclass(frozen=True)
class Launch:
    """Launch holds the command that starts a step's processes, and the arguments of its own."""

    step: str
    prefix: tuple[str, ...]
    arguments: tuple[str, ...] = ()

    def command(self, shared: Sequence[str]) -> list[str]:
        """Return the whole command line."""
        return [*self.prefix, str(JOBS / f"{self.step}.py"), *shared, *self.arguments]


def launches(kaldi_dir: str, supervised_ranks: int, student_ranks: int) -> list[Launch]:
    """Return the steps in order, each with spark-submit, torchrun or Python before it."""
    prefixes = {
        "python": (sys.executable,),
        "Spark": (str(Path(sys.executable).parent / "spark-submit"),),
        "torchrun": _torchrun(supervised_ranks),
    }
    found = {step: Launch(step, prefixes[starter]) for step, starter in STEPS.items()}
    found[INGEST] = Launch(INGEST, prefixes["python"], ("--kaldi-dir", kaldi_dir))
    found[TRAIN_STUDENT] = Launch(TRAIN_STUDENT, _torchrun(student_ranks))
    return list(found.values())


def _torchrun(num_ranks: int) -> tuple[str, ...]:
    # One restart, from the last checkpoint: gloo's rendezvous failed once in hundreds of starts.
    ranks = ("--nproc-per-node", str(num_ranks), "--max-restarts", "1")
    # "--": torchrun would take our --run for an abbreviation of its --run-path.
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", *ranks, "--")


def run_steps(steps: Sequence[Launch], shared: Sequence[str]) -> int:
    """Run the steps one after the other; stop at the first that fails, with its exit code."""
    started = time.monotonic()
    # OpenBLAS's own threads made the bootstrap alignment 30 times slower on two busy cores.
    environment = spark_environment() | {"OPENBLAS_NUM_THREADS": "1"}
    for number, launch in enumerate(steps, 1):
        elapsed = time.monotonic() - started
        print(
            f"[{number}/{len(steps)}] {launch.step} ({elapsed:.0f} s)", file=sys.stderr, flush=True
        )
        code = subprocess.run(launch.command(shared), env=environment, check=False).returncode
        if code:
            print(
                f"{launch.step} failed with exit code {code}: fix the cause, then give the same "
                "command again to resume here",
                file=sys.stderr,
            )
            return code
    return 0


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that decide where all steps run, and on how many ranks they train."""
    parser.add_argument("--run", required=True, help="folder or s3:// URI that holds the run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="replace one value of the recipe; repeat it for more",
    )
    ranks = "processes that train {}, default {}"
    for option, models, default in (
        ("--supervised-ranks", "the baseline and the teacher", 2),
        ("--student-ranks", "the student", 4),
    ):
        parser.add_argument(option, type=int, default=default, help=ranks.format(models, default))


def shared_arguments(recipe: str, arguments: argparse.Namespace) -> list[str]:
    """Return the arguments that every step receives."""
    overrides = [part for override in arguments.set for part in ("--set", override)]
    return ["--recipe", recipe, "--run", arguments.run, *overrides]


def main() -> None:
    """Parse the command line and run all steps."""
    parser = argparse.ArgumentParser(
        prog="megahour run",
        description="Run every step, each in its own processes, from a Kaldi data directory to "
        "word error rates and a report. The same command resumes an interrupted run.",
        epilog="Exit codes: 0 done, 2 bad usage; else that of the first step that failed.",
    )
    parser.add_argument(
        "--recipe", required=True, help="TOML file, or a name in jobs/recipes: recorded, hours_1m"
    )
    parser.add_argument(
        "--kaldi-dir",
        required=True,
        help="Kaldi data directory with labelled, unlabelled and heldout .speakers",
    )
    add_run_arguments(parser)
    arguments = parser.parse_args()
    steps = launches(arguments.kaldi_dir, arguments.supervised_ranks, arguments.student_ranks)
    sys.exit(run_steps(steps, shared_arguments(arguments.recipe, arguments)))


if __name__ == "__main__":
    main()
