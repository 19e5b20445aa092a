"""Run every step, each as its own process, from a Kaldi data directory to word error rates.

python -m jobs.run --recipe recorded --run runs/mine --kaldi-dir /data/mine
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.spark.session import spark_environment

JOBS = Path(__file__).parent


@dataclass(frozen=True)
class Launch:
    """How a step's process is started."""

    step: str
    prefix: tuple[str, ...]
    arguments: tuple[str, ...] = ()

    def command(self, shared: Sequence[str]) -> list[str]:
        """The whole command line."""
        return [*self.prefix, str(JOBS / f"{self.step}.py"), *shared, *self.arguments]


def launches(kaldi_dir: str, supervised_ranks: int, student_ranks: int) -> list[Launch]:
    """The steps in order: spark-submit for the pipeline, torchrun for training, else python."""
    python = (sys.executable,)
    spark = (str(Path(sys.executable).parent / "spark-submit"),)

    def torchrun(num_ranks: int) -> tuple[str, ...]:
        module = "torch.distributed.run"
        # Once more, from the last checkpoint: gloo's meeting has failed once in hundreds of starts.
        ranks = ("--nproc-per-node", str(num_ranks), "--max-restarts", "1")
        # "--": torchrun would take our --run for an abbreviation of its --run-path.
        return (*python, "-m", module, "--standalone", *ranks, "--")

    return [
        Launch("ingest", python, ("--kaldi-dir", kaldi_dir)),
        Launch("select_utterances", spark),
        Launch("extract_features", spark),
        Launch("align", python),
        Launch("train_baseline", torchrun(supervised_ranks)),
        Launch("train_teacher", torchrun(supervised_ranks)),
        Launch("generate_targets", spark),
        Launch("repartition", spark),
        Launch("train_student", torchrun(student_ranks)),
        Launch("evaluate", python),
        Launch("certify", python),
        Launch("report", python),
    ]


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
                f"{launch.step} failed with exit code {code}; once its cause is mended, the same "
                "command goes on from here",
                file=sys.stderr,
            )
            return code
    return 0


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that decide where and how all steps run."""
    parser.add_argument("--run", required=True, help="s3:// URI or path that holds the run")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--supervised-ranks", type=int, default=2, help="ranks of the teacher")
    parser.add_argument("--student-ranks", type=int, default=4, help="ranks of the student")


def shared_arguments(recipe: str, arguments: argparse.Namespace) -> list[str]:
    """What every step is told."""
    overrides = [part for override in arguments.set for part in ("--set", override)]
    return ["--recipe", recipe, "--run", arguments.run, *overrides]


def main() -> None:
    """Parse the command line and run all steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", required=True, help="TOML file, or a name in jobs/recipes")
    parser.add_argument("--kaldi-dir", required=True, help="Kaldi data directory, speakers split")
    add_run_arguments(parser)
    arguments = parser.parse_args()
    ranks = arguments.supervised_ranks, arguments.student_ranks
    steps = launches(arguments.kaldi_dir, *ranks)
    sys.exit(run_steps(steps, shared_arguments(arguments.recipe, arguments)))


if __name__ == "__main__":
    main()
