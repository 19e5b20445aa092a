"""Each recipe that is shipped passes the check that begins a run; README's is the measured one."""

import itertools
from pathlib import Path

import pytest

from pipeline.steps.ingestion.placed_audio import PlacementChoice
from tests.benchmarks.rotation.__main__ import EVERY_PLACEMENT, NUM_DRAWN
from tests.documents.document_commands import ROOT, commands_of
from tests.job_programs import RunJob
from tests.small_corpus import write_kaldi_tables

SHIPPED = sorted(path.stem for path in (ROOT / "jobs" / "recipes").glob("*.toml"))
HELP = "demo, recorded, placements, hours_1m"


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_is_checked(run_job: RunJob, tmp_path: Path, name: str) -> None:
    """All is well on two ranks, as for a run on this host; the help of jobs names the recipe."""
    write_kaldi_tables(tmp_path, "A AH\nB B IY\n")
    given = ("--recipe", name, "--run", str(tmp_path / "run"), "--kaldi-dir", str(tmp_path))
    ranks = ("--supervised-ranks", "2", "--student-ranks", "2")
    said = run_job("check", *given, *ranks)
    assert (said.code, said.out) == (0, f"check: {name}: all is well\n"), said.err
    assert sorted(HELP.split(", ")) == SHIPPED
    assert HELP in " ".join(run_job("check", "--help").out.split())


def test_readme_runs_what_was_measured() -> None:
    """Its line for own speech has the rotation's placements, recipe, ranks and dev share."""
    (words,) = [
        each.words
        for each in commands_of(ROOT / "README.md")
        if each.job and each.job[0] == "run" and "--placements" in each.words
    ]
    given = dict(itertools.pairwise(words))
    known = EVERY_PLACEMENT.split(",")[1:]
    named = PlacementChoice.parse(given["--placements"], known)
    drawn = PlacementChoice.parse(f"{NUM_DRAWN}:{EVERY_PLACEMENT}", known)
    for seed in range(5):
        assert named.of("an4-1", seed) == drawn.of("an4-1", seed) == EVERY_PLACEMENT.split(",")
    assert (given["--recipe"], given["--dev-share"]) == ("placements", "0.2")
    assert given["--supervised-ranks"] == given["--student-ranks"] == "1"
