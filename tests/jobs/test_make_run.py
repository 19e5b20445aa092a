"""`make run` hands its variables to `megahour run`."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

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
