"""A step that `jobs.run` launches ends with its own code, and once survives the loss of a rank."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import jobs.run
from infra.log_lines import LogFormat, begin_log
from infra.settings import ConfigurationError
from infra.store.uris import normalize_uri
from jobs.cli.arguments import (
    INGEST_OPTIONS,
    KALDI_DIR,
    add_placement_arguments,
    given_options,
    names_labelled_alone,
)
from jobs.run import Launch, chosen_steps, exit_with, launches, run_steps
from tests.job_programs import RunJob
from tests.training.forked_programs import Program, run_forked
from training.distributed import rank_launcher

DIES_ONCE = """
import os, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(1) if os.environ["RANK"] == "1" else time.sleep(100)
# In one piece: unbuffered, print() writes each word by itself, and the ranks share a pipe.
os.write(1, f"rank {os.environ['RANK']} {' '.join(sys.argv[1:])}\\n".encode())
"""


def test_a_run_hands_placements_to_ingest() -> None:
    """As they were given; without them ingest has no argument of the kind."""
    parser = argparse.ArgumentParser()
    add_placement_arguments(parser)
    given = ["--placements", "2", "--heldout-placements", "clean,DP1", "--placement-seed", "7"]
    for options in (given, given[:2], given[4:], [*given[4:5], "0"], []):
        passed = given_options(parser.parse_args(options), INGEST_OPTIONS)
        assert passed == options
        (ingest, *others) = launches(["--kaldi-dir", "data", *passed], 2, 2)
        assert ingest.arguments == ("--kaldi-dir", "data", *options)
        assert not any("--placements" in each.arguments for each in others)


def test_a_run_of_labelled_speech_alone_has_no_student(tmp_path: Path) -> None:
    """Without unlabelled speakers, or manifests of them, all steps before and the report remain."""

    def are_alone(kaldi_dir: Path | None, *manifests: str) -> bool:
        given = str(kaldi_dir) if kaldi_dir else None
        return names_labelled_alone(argparse.Namespace(kaldi_dir=given, manifest=manifests))

    assert are_alone(tmp_path)
    assert are_alone(None, "labelled=a.jsonl", "heldout=b.jsonl")
    assert not are_alone(None, "labelled=a.jsonl", "b.jsonl")
    found = launches([KALDI_DIR, "data"], 2, 2, num_target_rounds=2, is_labelled_alone=True)
    assert len(found) == len({each.step for each in found}), "no target, no round"
    every = [each.step for each in launches([KALDI_DIR, "data"], 2, 2)]
    assert [each for each in every if each not in {launch.step for launch in found}] == [
        *("generate_targets", "repartition", "train_student", "certify")
    ]
    (tmp_path / "unlabelled.speakers").write_text("ann\n")
    assert not any(map(are_alone, (tmp_path, tmp_path / "missing", None)))
    arguments = argparse.Namespace(first="train_student", only=[])
    with pytest.raises(
        ConfigurationError, match=r"--from train_student: .* no unlabelled.speakers"
    ):
        chosen_steps(found, arguments)


def test_a_demo_has_a_student(
    tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its corpus has unlabelled speech, though it is not there yet."""
    listed: list[str] = []

    def list_them(chosen: Sequence[Launch], shared: Sequence[str]) -> int:
        del shared
        listed.extend(launch.step for launch in chosen)
        return 0

    monkeypatch.setattr(jobs.run, "dry_run", list_them)
    options = ("--run", str(tmp_path / "demo"), "--dry-run", "--only", "train_student")
    assert run_job("demo", *options).code == 0
    assert listed == ["train_student"]


def test_a_training_step_is_started_once_more(tmp_path: Path) -> None:
    """A rank that dies once, say in gloo's meeting, does not end the run."""
    script = tmp_path / "dies_once.py"
    script.write_text(DIES_ONCE)
    (launch,) = [
        each for each in launches(["--kaldi-dir", "data"], 2, 2) if each.step == "train_student"
    ]
    command = [*launch.prefix, str(script), "--run", "somewhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {n} --run somewhere" for n in (0, 1)]


def test_a_run_of_no_step_is_refused() -> None:
    """A scheduler would take it for done."""
    steps = launches(["--kaldi-dir", "data"], 2, 2)
    chosen = argparse.Namespace(first="realign", only=["ingest", "bootstrap"])
    with pytest.raises(ConfigurationError, match="--only ingest, bootstrap: no step is left from"):
        chosen_steps(steps, chosen)


ENDS = """
import os, signal, sys, time
how = sys.argv[1]
if os.environ.get("RANK") == "0":
    time.sleep(100)
if how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(how))
"""


def _training_step() -> Launch:
    return next(
        each for each in launches(["--kaldi-dir", "data"], 2, 2) if each.step == "train_student"
    )


@pytest.mark.parametrize(("how", "code"), [("3", 3), ("killed", 137)])
def test_torchrun_ends_as_the_rank_that_failed(tmp_path: Path, how: str, code: int) -> None:
    """A rank's code remains, where torchrun's is always 1; a signal becomes a shell's code."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    _, _, module, *options = _training_step().prefix
    options = ["0" if each == "1" else each for each in options]  # no second start
    assert module == rank_launcher.__name__
    launcher = Path(rank_launcher.__file__)
    (done,) = run_forked([Program(launcher, (*options, str(script), how), tmp_path)])
    assert done.code == code, done.err
    named = "was killed by signal 9 (SIGKILL), perhaps out of memory" in done.err
    assert named == (how == "killed")
    assert "OMP_NUM_THREADS" not in done.err, "torchrun warns of what it sets itself"


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("3", 3, "ends failed with exit code 3: fix the cause"),
        ("killed", 137, "ends was killed by signal 9 (SIGKILL), perhaps out of memory: fix the"),
    ],
)
def test_a_run_says_how_its_step_ended(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    how: str,
    code: int,
    said: str,
) -> None:
    """Its exit code is the step's, 128 + n for signal n; the steps after it are not begun."""
    (tmp_path / "ends.py").write_text(ENDS)
    monkeypatch.setattr(jobs.run, "JOBS", tmp_path)
    steps = [Launch("ends", (sys.executable,)), Launch("never", (sys.executable,))]
    assert run_steps(steps, [how]) == code
    err = capfd.readouterr().err
    assert said in err
    assert "never" not in err


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_last_line_of_an_interrupted_run_has_the_chosen_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], log_format: LogFormat
) -> None:
    """With --log-format json it is an object with time and step, as all lines before it."""
    monkeypatch.setenv("MEGAHOUR_LOG_FORMAT", "text")
    monkeypatch.setenv("MEGAHOUR_LOG_STEP", "")

    def interrupt() -> int:
        raise KeyboardInterrupt

    begin_log("run", log_format)
    with pytest.raises(SystemExit, match="130"):
        exit_with(interrupt)
    (line,) = capsys.readouterr().err.splitlines()
    if log_format == "json":
        found = json.loads(line)
        assert found["step"] == "run"
        line = f"run: {found['message']}"
    assert line == "run: interrupted: the same command resumes"


def test_a_malformed_uri_ends_a_run_as_a_wrong_option_does(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line and exit code 2."""

    def refuse() -> int:
        normalize_uri("http://x/y.jsonl")
        return 0

    begin_log("run", "text")
    with pytest.raises(SystemExit, match="2"):
        exit_with(refuse)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("run: http://x/y.jsonl: unknown scheme http://")


ROOT = Path(__file__).parents[2]


def options_of(*variables: str) -> list[str]:
    """Return the options of the command that make would start last."""
    command = ["make", "--dry-run", "--no-print-directory", "run", *variables]
    environment = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    words = shlex.split(done.stdout.replace("\\\n", " ").splitlines()[-1])
    return words[words.index("jobs.run") + 1 :]


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        (("KALDI_DIR=/data/my speech",), ("--kaldi-dir", "/data/my speech")),
        (
            ("MANIFEST=labelled=s3://b/a.jsonl s3://b/days", "LEXICON=s3://b/lexicon.txt"),
            (
                *("--manifest", "labelled=s3://b/a.jsonl", "--manifest", "s3://b/days"),
                *("--lexicon", "s3://b/lexicon.txt"),
            ),
        ),
        (
            ("MANIFEST=data/days", "LANGUAGE_MODEL=data/lm.arpa"),
            ("--manifest", "data/days", "--language-model", "data/lm.arpa"),
        ),
        ((), ()),
    ],
)
def test_a_run_gets_what_is_to_be_ingested(
    variables: tuple[str, ...], options: tuple[str, ...]
) -> None:
    """A directory, manifests, or nothing, where the corpus at corpus.uri is there."""
    assert options_of(*variables) == ["--recipe", "recorded", "--run", "runs/mine", *options]


def test_a_run_gets_recipe_and_place() -> None:
    """RECIPE and RUN are those that the command line of make names."""
    found = options_of("RECIPE=mine.toml", "RUN=s3://b/mine")
    assert found == ["--recipe", "mine.toml", "--run", "s3://b/mine"]
