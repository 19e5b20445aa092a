"""Set a run beside another one: rates, the matched-pairs test, hours, seconds and settings."""

from collections.abc import Mapping
from typing import Any

from jobs.report_page.blocks import (
    Cell,
    Paragraph,
    Row,
    Table,
    grouped_table,
    number,
    printable,
    table,
)
from jobs.report_page.certainty import bounds, probability
from jobs.report_page.scores import Report, development_rates, in_order, placements

MAX_SETTINGS = 60
"""The page shows so many differing settings at most."""


def comparison_note(report: Report) -> Paragraph | None:
    """Name the other run, and say whether both were evaluated on the same utterances."""
    found = _other(report)
    if not found:
        return None
    text = f"Beside {found['run']}. A difference below 0 and a WERR above 0 favour this run."
    words = [_development_words(each) for each in (found, report)]
    if all(words):
        text += (
            " Choose between the two recipes by the development WER, in which no held-out speaker "
            "has a part."
        )
    if all(words) and words[0] != words[1]:
        text += f" It is of {words[0]:,} and {words[1]:,} words: not of the same speakers."
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


def development_table(report: Report) -> Table | None:
    """Tabulate each model's word error rate on the development speakers of both runs."""
    rows = [_rates(model, here, there) for model, here, there in _development(report)]
    header = ["Model", "other run", "this run", "difference"]
    return table("Development WER of both runs, with each model's chosen settings, %", header, rows)


def development_columns(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return the models under a heading, and a column a run, for the terminal."""
    found = _development(report)
    if not found:
        return [], []
    models, here, there = zip(*found, strict=True)
    columns = [["other run", *map(number, there)], ["this run", *map(number, here)]]
    return ["development WER, %", *map(printable, models)], columns


def _development(report: Report) -> list[tuple[str, float, float]]:
    """Return the rates of each model that both runs have tuned: here and there."""
    here, there = development_rates(report), development_rates(_other(report))
    return [(model, here[model], there[model]) for model in here if model in there]


def _development_words(report: Report) -> int:
    found = report.get("development") or {}
    return max((each["reference_words"] for each in found.values()), default=0)


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
