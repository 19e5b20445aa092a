"""Show where the hours of speech went, and when, where and at what cost the run was made.

The hours run from ingest to training: kept, not selected, quarantined, lost. What each step took
stands beside its plan.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from jobs.report_page.blocks import (
    Cell,
    Facts,
    Figure,
    Row,
    Table,
    counted,
    grouped_table,
    hours_text,
    number,
    printable,
    table,
)
from jobs.report_page.certainty import pooled_comparison
from jobs.report_page.figures import hours_waterfall
from jobs.report_page.tables import Report, mean
from pipeline.runs.names import BASELINE, STUDENT, UNLABELLED

Stage = Mapping[str, Any]
MS_PER_HOUR = 3_600_000

EVERY_SUBSET = "all subsets"
"""The name of what the subsets share: an ingest counts them together."""


def waterfall_table(report: Report) -> Table | None:
    """Tabulate the hours and utterances of each stage of each subset."""
    groups: dict[str, list[Row]] = {
        subset: [_row(stage) for stage in stages] for subset, stages in _subsets(report).items()
    }
    header = ["Subset", "Step", "hours in", "not selected", "quarantined", "hours out", "lost"]
    return grouped_table("Hours from ingest to training and evaluation", header, groups)


def waterfall_figure(report: Report) -> Figure | None:
    """Draw the unlabelled hours from metadata to training; None where they are not known."""
    stages = _subsets(report).get(UNLABELLED, ())
    if not stages:
        return None
    bars = [("metadata", 0.0, _hours(stages[0]["in_ms"]))]
    for stage in stages:
        at = stage["in_ms"]
        for name, key in (("not selected", "unselected_ms"), ("quarantined", "quarantined_ms")):
            if stage[key]:
                bars.append((name, _hours(at), _hours(at - stage[key])))
                at -= stage[key]
        bars.append((stage["step"].partition("/")[0], 0.0, _hours(stage["out_ms"])))
    return Figure(hours_waterfall(bars), waterfall_note(report))


def waterfall_note(report: Report) -> str:
    """Say of the unlabelled hours how many were lost; it should be none."""
    stages = _subsets(report).get(UNLABELLED, ())
    begin, end = _hours(stages[0]["in_ms"]), _hours(stages[-1]["out_ms"])
    unselected = _hours(sum(stage["unselected_ms"] for stage in stages))
    quarantined = _hours(sum(stage["quarantined_ms"] for stage in stages))
    lost = _lost_ms(stages)
    kept = (
        f"Of {number(begin, 2)} h of unlabelled metadata {number(unselected, 2)} h were not "
        f"selected, {number(quarantined, 2)} h were quarantined, and {number(end, 2)} h are in "
        "training partitions"
    )
    if lost == 0:
        said = f"{kept}; 0 lost: every step's hours add up to the millisecond."
    else:
        said = f"{kept}; {lost:,} ms are in no manifest: run megahour verify."
    return " ".join(each for each in (ingest_note(report), said) if each)


def ingest_note(report: Report) -> str:
    """Say what became of all subsets' utterances at ingest; an empty text without an ingest."""
    stages = _subsets(report).get(EVERY_SUBSET, ())
    if not stages:
        return ""
    (stage,) = stages
    return (
        f"Ingest wrote metadata of {counted(stage['utterances_out'], 'utterance')}, "
        f"{number(_hours(stage['out_ms']), 2)} h of all subsets, and quarantined "
        f"{counted(stage['utterances_quarantined'], 'utterance')}, "
        f"{number(_hours(stage['quarantined_ms']), 2)} h."
    )


def lost_hours(report: Report) -> str | None:
    """Write the hours that no manifest accounts for; None where the stages are not known."""
    subsets = _subsets(report)
    if not subsets:
        return None
    lost = sum(map(_lost_ms, subsets.values()))
    return "0" if lost == 0 else number(_hours(lost), 4)


def _lost_ms(stages: Sequence[Stage]) -> int:
    """Sum up what each step loses, and what differs between a step and the next one."""
    between = pairwise(stages)
    return sum(map(_unaccounted_ms, stages)) + sum(
        abs(int(one["out_ms"]) - int(other["in_ms"])) for one, other in between
    )


def _unaccounted_ms(stage: Stage) -> int:
    kept = stage["out_ms"] + stage["unselected_ms"] + stage["quarantined_ms"]
    return abs(int(stage["in_ms"]) - int(kept))


def _row(stage: Stage) -> Row:
    keys = ("in_ms", "unselected_ms", "quarantined_ms", "out_ms")
    lost = _unaccounted_ms(stage)
    shown = Cell("0") if lost == 0 else Cell(f"{lost:,} ms", "worse")
    return [stage["step"], *(number(_hours(stage[key]), 3) for key in keys), shown]


def _hours(milliseconds: float) -> float:
    return milliseconds / MS_PER_HOUR


def _subsets(report: Report) -> Mapping[str, Sequence[Stage]]:
    found: Mapping[str, Sequence[Stage]] = report.get("waterfall") or {}
    return found


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
