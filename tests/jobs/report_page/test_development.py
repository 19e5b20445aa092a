"""The development speakers' word errors are shown, so that no recipe is chosen by others."""

from pathlib import Path

import pytest

from tests.job_programs import RunJob
from tests.jobs.report_page.reported_run import document, report, text_of_page, write_reported_run

pytestmark = pytest.mark.usefixtures("plain_drawings")

ERRORS = {"baseline": [4, 4, 4], "teacher": [2, 2, 2], "student": [3, 3, 3]}
HERE = {"baseline": [20, 18, 19], "teacher": [9, 9, 12], "student": [14, 13, 12]}
THERE = {"baseline": [18, 18, 18], "teacher": [11, 10, 10], "student": [15, 12, 11]}
NOTE = "then no held-out speaker influences the choice"


def test_the_rate_of_the_chosen_settings_is_shown(run_job: RunJob, tmp_path: Path) -> None:
    """18 of 50 words are 36 % of the second scale tried; 9 errors of the first of two equal."""
    write_reported_run(tmp_path, ERRORS, development=HERE)
    said = report(run_job, tmp_path)
    found = document(tmp_path)["development"]
    assert {name: each["wer"] for name, each in found.items()} == {
        "baseline": 36.0,
        "teacher": 18.0,
        "student": 24.0,
    }
    assert found["baseline"]["substitutions"] == 18
    assert found["baseline"]["reference_words"] == 50
    page = text_of_page(tmp_path)
    assert "language model scale ngram order development WER" in page
    for row in ("baseline 0.2 0 1 3 36.0", "teacher 0.1 0 1 3 18.0", "student 0.3 0 1 3 24.0"):
        assert row in page
    assert NOTE in page
    lines = [line.split() for line in said.out.splitlines()]
    assert ["WER,", "%", "all", "dev"] in lines
    assert ["student", "30.0", "24.0"] in lines
    assert ["WERR", "25.0", "-"] in lines


def test_a_run_without_development_speakers_has_no_such_rate(
    run_job: RunJob, tmp_path: Path
) -> None:
    """Neither the terminal nor the page speaks of one."""
    write_reported_run(tmp_path, ERRORS)
    assert " dev" not in report(run_job, tmp_path).out
    assert document(tmp_path)["development"] == {}
    assert "development WER" not in text_of_page(tmp_path)


def test_two_runs_are_compared_on_the_development_speakers(run_job: RunJob, tmp_path: Path) -> None:
    """24 % here and 22 % there: the other run's student is better, whatever was held out."""
    here, there = tmp_path / "new", tmp_path / "old"
    write_reported_run(there, ERRORS, development=THERE)
    write_reported_run(here, ERRORS, development=HERE)
    report(run_job, there)
    said = report(run_job, here, "--compare", str(there))
    page = text_of_page(here)
    assert "Choose between the two recipes by the development WER" in page
    assert "so the speakers are" not in page
    for row in ("baseline 36.0 36.0 0.0", "teacher 20.0 18.0 -2.0", "student 22.0 24.0 2.0"):
        assert row.replace("-", "\N{MINUS SIGN}") in page
    lines = [line.split() for line in said.out.splitlines()]
    heading = lines.index(["development", "WER,", "%", "other", "run", "this", "run"])
    assert lines[heading + 1 : heading + 4] == [
        ["baseline", "36.0", "36.0"],
        ["teacher", "20.0", "18.0"],
        ["student", "22.0", "24.0"],
    ]


def test_a_comparison_with_a_run_that_was_not_tuned_has_no_such_rates(
    run_job: RunJob, tmp_path: Path
) -> None:
    """The other run's speakers are unknown; the held-out rates stand as ever."""
    here, there = tmp_path / "new", tmp_path / "old"
    write_reported_run(there, ERRORS)
    write_reported_run(here, ERRORS, development=HERE)
    report(run_job, there)
    said = report(run_job, here, "--compare", str(there))
    assert "development WER" not in said.out
    assert "Choose between the two recipes" not in text_of_page(here)
