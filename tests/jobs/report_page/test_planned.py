"""The report sets what was planned beside what happened, on the page and in the terminal."""

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from jobs.report_page import format_table, render_report

pytestmark = pytest.mark.usefixtures("plain_drawings")


@pytest.fixture
def report() -> dict[str, Any]:
    """A report of two steps, one of which trains; seconds were calibrated for."""
    return {
        "run": "runs/demo",
        "code_version": "0.1.0",
        "plan": {
            "calibrated_on": "a machine",
            "steps": {
                "extract_features": {
                    "tasks": {"planned": 16, "actual": 17},
                    "objects": {"planned": 34, "actual": 36},
                    "bytes written": {"planned": 2_000_000.0, "actual": 2_100_000},
                    "requests": {"planned": 3_300, "actual": None},
                    "task seconds": {"planned": 10.0, "actual": 12.5},
                    "seconds": {"planned": 11.0, "actual": 12.0},
                },
                "train_student": {"seconds": {"planned": 100.0, "actual": 90.0}},
            },
        },
    }


def rows(page: str) -> list[list[str | None]]:
    """The cells of every row of the page's tables."""
    root = ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))
    return [[cell.text for cell in row] for row in root.iter("tr")]


def test_page_sets_planned_beside_actual(report: dict[str, Any]) -> None:
    """A row a quantity with the ratio; unknown ones are dashes; the note names the machine."""
    page = render_report(report)
    found = rows(page)
    assert ["extract_features", "tasks", "16", "17", "1.06"] in found
    assert ["bytes written", "2,000,000", "2,100,000", "1.05"] in found
    assert ["requests", "3,300", "\N{EN DASH}", "\N{EN DASH}"] in found
    assert ["task seconds", "10.0", "12.5", "1.25"] in found
    assert ["train_student", "seconds", "100.0", "90.0", "0.90"] in found
    assert "from a calibration on a machine." in page


def test_page_without_calibration_says_so(report: dict[str, Any]) -> None:
    """Seconds without a plan have dashes, and the note names the command."""
    report["plan"]["calibrated_on"] = None
    report["plan"]["steps"]["train_student"]["seconds"]["planned"] = None
    page = render_report(report)
    dash = "\N{EN DASH}"
    assert ["train_student", "seconds", dash, "90.0", dash] in rows(page)
    assert "megahour plan --run was not run before" in page


@pytest.mark.parametrize("plan", [{}, {"steps": {}}, None])
def test_no_plan_no_section(report: dict[str, Any], plan: object) -> None:
    """A run whose hours nothing tells has neither section nor table."""
    report["plan"] = plan
    assert "Planned and actual" not in render_report(report)
    assert "planned" not in format_table(report)


def test_terminal_table_is_aligned_and_fits(report: dict[str, Any]) -> None:
    """Steps under one another, pairs to the right; wide numbers fold into further blocks."""
    lines = format_table(report).split("\n\n")[-1].splitlines()
    assert lines[0].split() == [
        "planned,",
        "actual",
        "objects",
        "bytes",
        "written",
        "requests",
        "seconds",
    ]
    assert lines[1].split() == [
        "extract_features",
        "34",
        "36",
        "2.0M",
        "2.1M",
        "3,300",
        "-",
        "11",
        "12",
    ]
    assert lines[2].split() == ["train_student", "100", "90"]
    assert len({len(line) for line in lines}) == 1
    wide = {"planned": 4e11, "actual": 4e11}
    report["plan"]["steps"]["extract_features"] = dict.fromkeys(("objects", "requests"), wide)
    assert max(map(len, format_table(report).splitlines())) <= 70


def test_names_are_untrusted(report: dict[str, Any]) -> None:
    """Steps, quantities and the machine come from files: markup and terminal codes are text."""
    hostile = "<script>alert(1)</script>\x1b[31m"
    pair = {"planned": 1.0, "actual": 1.0}
    report["plan"] = {"calibrated_on": hostile, "steps": {hostile: {hostile: pair}}}
    assert "<script" not in render_report(report)
    assert "\x1b" not in format_table(report)
