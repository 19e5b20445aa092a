"""Show other runs beside this one: a comparison, a curve over hours, an oracle.

The comparison has rates, the matched-pairs test, hours, seconds and settings. The curve has word
error rates against the hours of unlabelled speech. Recovery is the share of an oracle's gain on the
baseline that a model has.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from jobs.report_page.blocks import (
    Cell,
    Drawing,
    Paragraph,
    Row,
    Table,
    grouped_table,
    number,
    printable,
    table,
)
from jobs.report_page.certainty import POOLED, Estimate, bounds, probability
from jobs.report_page.figures import SERIES, Form, add_legend, drawn
from jobs.report_page.tables import Report, development_rates, in_order, placements
from pipeline.runs.names import BASELINE, ORACLE, STUDENT, UNLABELLED, sequence_trained

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


Point = Mapping[str, Any]
SHOWN = (BASELINE, STUDENT)


def hours_point(report: Report) -> Point:
    """Take from a run's report its hours of unlabelled speech, and its rates over all words.

    Raises ValueError for a report without them.
    """
    try:
        rates = report["statistics"]["pooled"]["wer"]
        shown = {
            model: {name: float(rates[model][name]) for name in ("value", "low", "high")}
            for model in SHOWN
        }
        hours = float(report["hours"][UNLABELLED])
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{report.get('run')}: its report has no intervals over several speakers ({error!r}): "
            "run megahour evaluate and report there again"
        ) from error
    return {"run": str(report["run"]), "hours": hours, "wer": shown}


def curve_table(report: Report) -> Table | None:
    """Tabulate the runs by rising hours."""
    rows = [
        [
            str(point["run"]).rstrip("/").rpartition("/")[2],
            number(point["hours"], 2),
            *(_rate(point["wer"][model]) for model in in_order(point["wer"])),
        ]
        for point in _points(report)
    ]
    caption = "Word error rates over all words with their intervals, %, by unlabelled hours"
    return table(caption, ["Run", "hours", *SHOWN], rows)


def _rate(rate: Mapping[str, float]) -> str:
    return f"{number(rate['value'])} ({number(rate['low'])} to {number(rate['high'])})"


def curve_drawing(report: Report) -> Drawing | None:
    """Draw the rates by the hours, which rise by factors; None for fewer than two runs."""
    points = _points(report)
    if len(points) < 2:
        return None

    def draw(form: Form) -> Figure:
        figure = form.figure(3.0)
        axes = figure.subplots()
        for index, model in enumerate(SHOWN):
            _plot(axes, points, model, SERIES[(0, 2)[index]])
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks([point["hours"] for point in points])
        axes.set_title("word error rate, %", loc="left")
        axes.set_xlabel("hours of unlabelled speech")
        add_legend(figure, form)
        return figure

    ends = ", ".join(
        f"{number(point['hours'], 2)} h {number(point['wer'][STUDENT]['value'])} %"
        for point in points
    )
    label = f"Word error rates of the student by hours of unlabelled speech: {ends}"
    return drawn(draw, "by-hours", label)


def _plot(axes: Axes, points: Sequence[Point], model: str, colour: str) -> None:
    rates = [point["wer"][model] for point in points]
    values = [rate["value"] for rate in rates]
    below = [rate["value"] - rate["low"] for rate in rates]
    above = [rate["high"] - rate["value"] for rate in rates]
    axes.errorbar(
        [point["hours"] for point in points],
        values,
        [below, above],
        label=printable(model),
        color=colour,
        marker="o",
        markersize=3.5,
        capsize=2.5,
    )


def _points(report: Report) -> list[Point]:
    return sorted(report.get("hours_curve") or (), key=lambda point: float(point["hours"]))


NONE = "none"
"""The recovery where the oracle gains nothing on the baseline."""

UNKNOWN_LANGUAGE_MODEL = (
    " The two runs are not known to decode with the same language model. Where they do not, "
    "recovery speaks of the language models, too: give the oracle this run's by evaluation.arpa."
)


def recovery_statement(report: Report) -> str:
    """State the student's recovery over all words, before and after sMBR; "" without an oracle."""
    found = _oracle(report)
    if not found:
        return ""
    said = f"Over all words {_stated(found, STUDENT)}"
    if (after := sequence_trained(STUDENT)) in found["pooled"]["recovery"]:
        said += f" After sMBR: over all words {_stated(found, after)}"
    return said


def _stated(found: Mapping[str, Any], model: str) -> str:
    recovery: Estimate | None = found["pooled"]["recovery"][model]
    if recovery is None:
        return "the oracle gains nothing on the baseline: none of it is recovered."
    low, high = bounds(recovery)
    return (
        f"the student recovers {number(recovery['value'])} % of what the oracle gains on the "
        f"baseline, with a {found['level']} % interval from {low} to {high} %."
    )


def recovery_note(report: Report) -> Paragraph | None:
    """Say which model is the oracle, what was transcribed for it, and what the two runs share."""
    found = _oracle(report)
    if not found:
        return None
    here, there = (found["labelled_hours"][run] or 0.0 for run in ("this", "oracle"))
    text = (
        f"The oracle is the baseline of {found['run']}. It learnt from {number(there, 2)} h of "
        f"transcribed speech, this run's from {number(here, 2)} h. Recovery is the share of the "
        "oracle's gain on the baseline that a model has; after sMBR all three have it."
    )
    if there <= here:
        text += " It learnt from no more than this run's, so it is no oracle of this run."
    if found["lacks"]:
        text += f" The oracle has no {found['lacks']}, so nothing is recovered after sMBR."
    text += "" if found["has_same_language_model"] else UNKNOWN_LANGUAGE_MODEL
    return Paragraph(text, "note")


def recovery_table(report: Report) -> Table | None:
    """Tabulate each model's word error rate and its recovery, with intervals, by placement."""
    groups: dict[str, list[Row]] = {
        name: [_row(found, model) for model in _shown(found)]
        for name, found in _scopes(report).items()
    }
    if not groups:
        return None
    header = ["Placement", "Model", "WER", "interval", "recovery", "interval"]
    oracle = _oracle(report)
    caption = (
        f"Word error rates and recovery, the share of the oracle's gain, %, with {oracle['level']} "
        f"% intervals of {oracle['num_resamples']:,} draws of speakers"
    )
    return grouped_table(caption, header, groups)


def _row(found: Mapping[str, Any], model: str) -> Row:
    rate: Estimate = found["wer"][model]
    row = [model, number(rate["value"]), " to ".join(bounds(rate))]
    if model not in found["recovery"]:
        return [*row, "", ""]
    recovery: Estimate | None = found["recovery"][model]
    if recovery is None:
        return [*row, NONE, ""]
    return [*row, Cell(number(recovery["value"]), "strong"), " to ".join(bounds(recovery))]


def _shown(found: Mapping[str, Any]) -> list[str]:
    """Order the models: those before sMBR, from the baseline to the oracle, then those after it."""
    before, after = _recovering(found)
    shown = [BASELINE, *before, ORACLE]
    if after:
        shown += [sequence_trained(BASELINE), *after, sequence_trained(ORACLE)]
    return shown


def _recovering(found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the models of which a share is stated, before sMBR and after it."""
    names: Mapping[str, Any] = found["recovery"]
    after = set(map(sequence_trained, names))
    before = in_order(name for name in names if name not in after)
    return before, [name for name in map(sequence_trained, before) if name in names]


def oracle_rates(report: Report) -> dict[str, dict[str, float]]:
    """Return the oracle's word error rates by placement, before and after sMBR."""
    at: Mapping[str, Any] = _oracle(report).get("by_placement") or {}
    rates: dict[str, dict[str, float]] = {}
    for name, found in at.items():
        for model in _shown(found):
            if model in (ORACLE, sequence_trained(ORACLE)):
                rates.setdefault(model, {})[name] = found["wer"][model]["value"]
    return rates


def recovery_columns(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return the placements under a heading, and a column a model, for the terminal."""
    scopes = _scopes(report)
    if not scopes:
        return [], []
    before, after = _recovering(next(iter(scopes.values())))
    columns = [
        [printable(model), *(_share(found["recovery"][model]) for found in scopes.values())]
        for model in (*before, *after)
    ]
    return ["recovery, %", *map(printable, scopes)], columns


def _share(recovery: Estimate | None) -> str:
    if recovery is None:
        return NONE
    return f"{number(recovery['value'])} ({' to '.join(bounds(recovery))})"


def _scopes(report: Report) -> dict[str, Mapping[str, Any]]:
    """Return what is recovered by placement, and over all words where there are several."""
    found = _oracle(report)
    if not found:
        return {}
    at = dict(found["by_placement"])
    if len(at) != 1:
        at[POOLED] = found["pooled"]
    return at


def _oracle(report: Report) -> Mapping[str, Any]:
    found: Mapping[str, Any] = report.get("oracle") or {}
    return found
