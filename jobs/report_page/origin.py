"""Show when, where, by which code and for how many dollars a run was made."""

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from jobs.report_page.blocks import Facts, Row, Table, hours_text, number, table
from jobs.report_page.certainty import pooled_comparison
from jobs.report_page.scores import Report, mean
from jobs.report_page.waterfall import lost_hours
from pipeline.runs.names import BASELINE, STUDENT

UNKNOWN = "not recorded"


def key_figures(report: Report) -> Facts | None:
    """Return the figures that a reader wants first: rates, gain, hours, losses."""
    wer: Mapping[str, Mapping[str, float]] = report.get("wer") or {}
    found = [
        (f"WER of the {model}", f"{number(mean(wer[model]))} %")
        for model in (BASELINE, STUDENT)
        if wer.get(model)
    ]
    if gained := pooled_comparison(report):
        found.append(("WERR over all words", f"{number(gained['reduction']['value'])} %"))
    hours: Mapping[str, float] = report.get("hours") or {}
    found += [(f"{name} speech", hours_text(value)) for name, value in hours.items()]
    if (lost := lost_hours(report)) is not None:
        found.append(("hours lost", lost))
    return Facts(tuple(found)) if found else None


def origin_facts(report: Report) -> Facts:
    """Return date, duration, machine, commit and dollars, and where the run is."""
    origin: Mapping[str, Any] = report.get("origin") or {}
    found = [("run", str(report["run"]))]
    found += [("extends", str(each)) for each in report.get("extends", [])[:1]]
    if origin:
        found += [
            ("finished", _date(origin["finished_at"])),
            ("duration", _duration(origin)),
            ("machine", _listed(origin["machines"])),
            ("commit", _listed(origin["commits"])),
            ("dollars", _dollars(origin)),
        ]
    return Facts((*found, ("version", f"megahour {report['code_version']}")))


def step_table(report: Report) -> Table | None:
    """Tabulate when each step ended, where it ran, and what it cost."""
    origin: Mapping[str, Any] = report.get("origin") or {}
    rows: list[Row] = [
        [
            name,
            _date(step["finished_at"]),
            step["machine"] or UNKNOWN,
            step["commit"] or UNKNOWN,
            number(step["dollars"], 2),
        ]
        for name, step in (origin.get("steps") or {}).items()
    ]
    header = ["Step", "finished", "machine", "commit", "dollars"]
    return table("When and where each step ran last", header, rows)


def _date(text: str) -> str:
    """Write a time of a record in UTC; a text that is none stays as it is."""
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{when.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def _duration(origin: Mapping[str, Any]) -> str:
    """Write the seconds that the steps were at work, and those from the first to the last."""
    work, passed = float(origin["step_seconds"]), float(origin["elapsed_seconds"])
    return f"{_time(work)} of work, {_time(passed)} from the first step to the last"


def _time(seconds: float) -> str:
    minutes, hours = seconds / 60, seconds / 3600
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes:.0f} min" if hours < 2 else f"{hours:,.1f} h"


def _listed(names: list[str]) -> str:
    return ", ".join(names) or UNKNOWN


def _dollars(origin: Mapping[str, Any]) -> str:
    """Write the sum of the steps' dollars, and of which steps nothing is known."""
    unknown = [name for name, step in origin["steps"].items() if step["dollars"] is None]
    if len(unknown) == len(origin["steps"]):
        return UNKNOWN
    total = f"{number(origin['dollars'], 2)} at the prices of the cluster files"
    return f"{total}, without {', '.join(unknown)}" if unknown else total
