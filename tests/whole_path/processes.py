"""Run the jobs as a user starts them: real processes, from the repository's root."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs.run import launches

REPOSITORY = Path(__file__).parents[2]
TINY = Path(__file__).with_name("tiny.toml")
TIME_LIMIT_S = 1800
"""A whole run took 562 s of wall beside three other processes; one that hangs takes for ever."""

Environment = Mapping[str, str]
Completed = subprocess.CompletedProcess[str]


def run_all_steps(
    run_uri: str, kaldi_dir: Path, environment: Environment, *options: str
) -> Completed:
    """Run the documented way to a user's own corpus."""
    return run_steps(run_uri, environment, "--kaldi-dir", str(kaldi_dir), *options)


def run_steps(run_uri: str, environment: Environment, *options: str) -> Completed:
    """Run the steps that the options choose; show the last lines of a failure."""
    shared = ("--recipe", str(TINY), "--run", run_uri, *options)
    done = _run([sys.executable, "-m", "jobs.run", *shared], environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def run_step(
    step: str, run_uri: str, environment: Environment, *options: str, num_ranks: int = 4
) -> Completed:
    """Run one step by itself, launched as jobs/run.py launches it."""
    every = launches(["--kaldi-dir", ""], num_ranks, num_ranks)
    (launch,) = [each for each in every if each.step == step]
    shared = ["--recipe", str(TINY), "--run", run_uri, *options]
    return _run(launch.command(shared), environment)


def _run(command: Sequence[str], environment: Environment) -> Completed:
    return subprocess.run(
        command,
        check=False,
        cwd=REPOSITORY,
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT_S,
    )


def left_behind(mark: str) -> list[str]:
    """Return command lines of the processes whose environment holds `mark`."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and mark.encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found
