"""Set a run beside another one: rates, the matched-pairs test, hours, seconds and settings."""

from collections.abc import Mapping
from typing import Any

from jobs.report_page.blocks import Cell, Paragraph, Row, Table, grouped_table, number, table
from jobs.report_page.certainty import bounds, probability
from jobs.report_page.scores import Report, in_order, placements

MAX_SETTINGS = 60
"""The page shows so many differing settings at most."""


def comparison_note(report: Report) -> Paragraph | None:
    """Name the other run, and say whether both were evaluated on the same utterances."""
    found = _other(report)
    if not found:
        return None
    text = f"Beside {found['run']}. A difference below 0 and a WERR above 0 favour this run."
    if found.get("not_paired"):
        text += f" There is no test of matched pairs: {found['not_paired']}."
    return Paragraph(text)


def rates_table(report: Report) -> Table | None:
    """Tabulate each model's word error rate in both runs, by placement."""
    here, there = report.get("wer") or {}, _other(report).get("wer") or {}
    both = [model for model in in_order(here) if model in there]
    groups: dict[str, list[Row]] = {
        name: [_rates(model, here[model].get(name), there[model].get(name)) for model in both]
        for name in placements(here)
    }
    header = ["Placement", "Model", "other run", "this run", "difference"]
    return grouped_table("Word error rates of both runs, %", header, groups)


def _rates(model: str, here: float | None, there: float | None) -> Row:
    known = here is not None and there is not None
    difference = here - there if here is not None and there is not None else None
    kind = "worse" if known and difference is not None and difference > 0 else "strong"
    return [model, number(there), number(here), Cell(number(difference), kind)]


def pairs_table(report: Report) -> Table | None:
    """Tabulate what each model of this run gains on the other run's, with its test."""
    rows: list[Row] = [
        [
            each["model"],
            number(each["reduction"]["value"]),
            " to ".join(bounds(each["reduction"])),
            probability(each["p_value"]),
        ]
        for each in _other(report).get("pairs") or ()
    ]
    caption = (
        "WERR of this run against the other one, %, over all words, with its interval and the "
        "exact permutation test over the same speakers"
    )
    return table(caption, ["Model", "WERR", "interval", "p"], rows)


def amounts_table(report: Report) -> Table | None:
    """Tabulate hours and seconds of both runs."""
    found = _other(report)
    if not found:
        return None
    rows: list[Row] = [
        [f"hours, {name}", number(there.get(name), 2), number(here.get(name), 2)]
        for here, there in [(report.get("hours") or {}, found.get("hours") or {})]
        for name in dict.fromkeys((*here, *there))
    ]
    here, there = _seconds(report), _seconds(found)
    rows += [
        [f"seconds, {step}", number(there.get(step)), number(here.get(step))]
        for step in dict.fromkeys((*here, *there))
    ]
    return table("Hours and seconds of both runs", ["", "other run", "this run"], rows)


def settings_table(report: Report) -> Table | None:
    """Tabulate the settings of the recipe that differ."""
    here, there = (_flat(each.get("recipe") or {}) for each in (report, _other(report)))
    if not there:
        return None
    names = [name for name in sorted(here.keys() | there) if here.get(name) != there.get(name)]
    rows: list[Row] = [
        [name, there.get(name, "absent"), here.get(name, "absent")] for name in names
    ]
    more = len(rows) - MAX_SETTINGS
    caption = "Settings that differ" + (f"; {more} more are in report.json" if more > 0 else "")
    return table(caption, ["Setting", "other run", "this run"], rows[:MAX_SETTINGS])


def _seconds(report: Mapping[str, Any]) -> dict[str, float]:
    return {name: step["seconds"] for name, step in (report.get("steps") or {}).items()}


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = str(value)
    return found


def _other(report: Report) -> Mapping[str, Any]:
    found: Mapping[str, Any] = report.get("comparison") or {}
    return found
