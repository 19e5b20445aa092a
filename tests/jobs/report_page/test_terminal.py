"""The report's text for the terminal: aligned, true, at most 70 columns wide."""

from typing import Any

import pytest

from jobs.report import format_table
from tests.jobs.report_page.whole_report import PLACEMENTS, whole_report


@pytest.fixture
def report() -> dict[str, Any]:
    return whole_report()


def tables(report: dict[str, Any]) -> list[list[str]]:
    """Return the lines of the tables, which follow four sentences in the whole report."""
    return [block.splitlines() for block in format_table(report).split("\n\n")[4:]]


def test_the_whole_table(report: dict[str, Any]) -> None:
    """Sentences, rates with the oracle's, recovery, confidence, development rates and the plan."""
    shown = format_table(report)
    stated = " ".join(shown.split())
    assert "Over 5 placements the student lowers the word error rate" in stated
    assert "together the WERR is 13.5 %, with a 95 % interval from 10.1 to 16.9 %." in stated
    assert "the student recovers 31.0 % of what the oracle gains" in stated
    assert "Of 6,170 held-out words 253 (4.1 %) are in no hypothesis" in stated
    assert "130 of 900 different words. They make at least 12.7 % of the errors of base" in stated
    words = [[line.split() for line in table] for table in tables(report)]
    assert words[0][0] == ["WER,", "%", *PLACEMENTS, "mean", "dev"]
    assert words[0][1] == ["baseline", "33.0", "39.0", "45.0", "51.0", "57.0", "45.0", "25.0"]
    assert words[0][4] == ["oracle", *["24.0"] * 6, "-"]
    assert words[0][5] == ["WERR", "20.7", "19.3", "18.3", "8.4", "7.5", "14.8", "-"]
    assert words[1][:2] == [["recovery,", "%", "teacher", "student"], ["DP1", "none", "none"]]
    assert ["all", "together", "33.7", "(25.7", "to", "41.7)", "31.0", "(22.0", "to", "40.0)"] in (
        words[1]
    )
    assert words[2][:2] == [
        ["confidence,", "%", "mean", "correct", "NCE"],
        ["baseline", "91.8", "87.5", "12.8"],
    ]
    assert words[3][1] == ["baseline", "25.0", "25.0"]
    assert all(len({len(line) for line in table}) == 1 for table in tables(report))
    assert max(map(len, shown.splitlines())) <= 70


def test_rates_after_sequence_training_have_a_row(report: dict[str, Any]) -> None:
    """The line below the WERR before."""
    report["werr_smbr"] = dict(zip(PLACEMENTS, (-1.0, 12.0, 13.0, 14.0, 17.0), strict=True))
    last = tables(report)[0][-1].split()
    assert last == ["WERR", "after", "sMBR", "-1.0", "12.0", "13.0", "14.0", "17.0", "11.0", "-"]


def test_one_placement_needs_no_mean_and_many_are_folded(report: dict[str, Any]) -> None:
    """Into blocks that fit the line."""
    report["wer"], report["werr"] = {"student": {"all": 30.0}}, {"all": 12.5}
    assert "mean" not in tables(report)[0][0]
    many = [f"kitchen {number}" for number in range(20)]
    report["wer"], report["werr"] = {"student": dict.fromkeys(many, 30.0)}, dict.fromkeys(many, 1.0)
    shown = format_table(report)
    assert all(name in shown for name in many)
    assert max(map(len, shown.splitlines())) <= 70


def test_the_plan_is_beside_what_happened(report: dict[str, Any]) -> None:
    """Pairs in short units, "-" for what is not known; wide columns fold."""
    pairs = {
        "objects": {"planned": 34, "actual": 36},
        "bytes written": {"planned": 2_000_000.0, "actual": 2_100_000},
        "requests": {"planned": 3_300, "actual": None},
        "seconds": {"planned": 11.0, "actual": 12.0},
    }
    trained = {"seconds": {"planned": 100.0, "actual": 90.0}}
    report["plan"]["steps"] = {"extract_features": pairs, "train_student": trained}
    words = [line.split() for line in tables(report)[-1]]
    assert words == [
        ["planned,", "actual", "objects", "bytes", "written", "requests", "seconds"],
        ["extract_features", "34", "36", "2.0M", "2.1M", "3,300", "-", "11", "12"],
        ["train_student", "100", "90"],
    ]
    pairs["objects"] = pairs["requests"] = {"planned": 4e11, "actual": 4e11}
    assert max(map(len, format_table(report).splitlines())) <= 70


def test_a_bare_report_says_that_nothing_was_evaluated() -> None:
    """One sentence and no table."""
    shown = format_table({"run": "runs/demo", "code_version": "0.1.0"})
    assert shown == "This run has no word error rates yet: it has not been evaluated."
