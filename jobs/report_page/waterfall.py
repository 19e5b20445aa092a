"""Show the hours of speech from ingest to training: kept, not selected, quarantined, lost."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from jobs.report_page.blocks import Cell, Figure, Row, Table, counted, grouped_table, number
from jobs.report_page.figures.bars import hours_waterfall
from jobs.report_page.scores import Report
from pipeline.runs.names import UNLABELLED

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
