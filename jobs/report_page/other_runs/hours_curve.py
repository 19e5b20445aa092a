"""Show word error rates against the hours of unlabelled speech, run beside run."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from jobs.report_page.blocks import Drawing, Table, number, printable, table
from jobs.report_page.figures.bars import add_legend
from jobs.report_page.figures.svg import SERIES, Form, drawn
from jobs.report_page.scores import Report, in_order
from pipeline.runs.names import BASELINE, STUDENT, UNLABELLED

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
