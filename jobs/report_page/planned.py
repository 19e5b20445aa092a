"""Show planned and actual cost of each step, for the page and for the terminal."""

from collections.abc import Mapping
from typing import Any

from jobs.report_page.blocks import Row, Table, grouped_table, number, printable
from jobs.report_page.scores import Report

Pair = Mapping[str, float | None]

SHOWN = ("objects", "bytes written", "requests", "seconds")
"""The quantities that the terminal shows."""


def plan_table(report: Report) -> Table | None:
    """Make a table of every quantity of every step: planned, actual, and their ratio."""
    groups: dict[str, list[Row]] = {
        step: [[quantity, *_cells(quantity, pair)] for quantity, pair in quantities.items()]
        for step, quantities in _steps(report).items()
    }
    header = ["Step", "", "planned", "actual", "actual / planned"]
    return grouped_table("What was planned for each step, and what it took", header, groups)


def plan_note(report: Report) -> str:
    """Explain the source of the planned figures; "" without a plan."""
    if not _steps(report):
        return ""
    counted = "Counts and bytes are planned from the hours and utterances of the ingested metadata"
    machine = report["plan"].get("calibrated_on")
    if machine is None:
        return f"{counted}; seconds are not, as megahour plan --run was not run before."
    return f"{counted}, seconds from a calibration on {machine}."


def plan_columns(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return the steps' names under a heading, and a column a quantity, for the terminal."""
    steps = _steps(report)
    names = ["planned, actual", *map(printable, steps)] if steps else []
    columns = [
        [quantity, *(_beside(quantity, step.get(quantity)) for step in steps.values())]
        for quantity in SHOWN
    ]
    return names, columns if steps else []


def _steps(report: Report) -> Mapping[str, Mapping[str, Pair]]:
    steps: Any = (report.get("plan") or {}).get("steps") or {}
    return dict(steps)


def _cells(quantity: str, pair: Pair) -> list[str]:
    planned, actual = pair["planned"], pair["actual"]
    digits = 1 if "seconds" in quantity else 0
    ratio = actual / planned if planned and actual is not None else None
    return [number(planned, digits), number(actual, digits), number(ratio, 2)]


def _beside(quantity: str, pair: Pair | None) -> str:
    if pair is None:
        return ""
    return " ".join(_short(quantity, pair[kind]) for kind in ("planned", "actual"))


def _short(quantity: str, value: float | None) -> str:
    if value is None:
        return "-"
    if "bytes" in quantity:
        return f"{value / 1e6:,.1f}M" if value >= 1e6 else f"{value / 1e3:,.0f}k"
    return f"{value:,.0f}"
