"""Draw bars and points: word error rates, speakers, hours, seconds."""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jobs.report_page.blocks import Drawing, number, printable
from jobs.report_page.figures.svg import FAINT, SERIES, Form, drawn
from jobs.report_page.scores import Scores, in_order, placements
from pipeline.runs.names import BASELINE, STUDENT

UPRIGHT_LETTERS_PER_INCH = 8
"""More letters than this do not fit side by side below an axis."""

MAX_LETTERS = 24
"""A longer name beside an axis would leave no room for its bars."""

SpeakerRates = Sequence[tuple[str, float, float]]
"""The word error rates of baseline and student by speaker, in percent."""

Stages = Sequence[tuple[str, float, float]]
"""The hours before and after each stage, by name; a total begins at 0."""


def word_error_bars(wer: Scores) -> Drawing:
    """Draw word error rates, a group of bars for each placement."""
    models, names = in_order(wer), placements(wer)

    def draw(form: Form) -> Figure:
        figure = form.figure(2.9)
        axes = figure.subplots()
        width = 0.8 / len(models)
        for index, model in enumerate(models):
            centres = [place - 0.4 + (index + 0.5) * width for place in range(len(names))]
            rates = [wer[model].get(name, 0.0) for name in names]
            colour = SERIES[index % len(SERIES)]
            axes.bar(centres, rates, 0.92 * width, color=colour, label=_short(model))
        axes.set_title("word error rate, %", loc="left")
        _name_groups(axes, names, form)
        add_legend(figure, form)
        return figure

    label = f"Bar chart of word error rates at {', '.join(names)} for {', '.join(models)}"
    return drawn(draw, "wer", f"{label}; the table above has the numbers")


def _name_groups(axes: Axes, names: Sequence[str], form: Form) -> None:
    axes.set_xticks(range(len(names)), [_short(name) for name in names])
    if sum(map(len, names)) > UPRIGHT_LETTERS_PER_INCH * form.width:
        for tick_label in axes.get_xticklabels():
            tick_label.set(rotation=30, ha="right")
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")


def speaker_points(rates: SpeakerRates) -> Drawing:
    """Draw a line for each speaker from the rate of the baseline to that of the student."""

    def draw(form: Form) -> Figure:
        figure = form.figure(1.0 + 0.21 * len(rates))
        axes = figure.subplots()
        rows = range(len(rates))
        before, after = [rate[1] for rate in rates], [rate[2] for rate in rates]
        axes.hlines(rows, before, after, color=FAINT, linewidth=2.5, zorder=1)
        axes.scatter(before, rows, color=SERIES[0], label=BASELINE, zorder=2)
        axes.scatter(after, rows, color=SERIES[2], label=STUDENT, zorder=3)
        _name_rows(axes, [rate[0] for rate in rates])
        axes.set_xlabel("word error rate, %")
        add_legend(figure, form)
        return figure

    ends = ", ".join(f"{name} {number(one)} to {number(two)}" for name, one, two in rates)
    return drawn(draw, "speakers", f"Word error rates of baseline and student by speaker: {ends}")


def hours_waterfall(stages: Stages) -> Drawing:
    """Draw the hours that stages keep and take away, from metadata to training."""

    def draw(form: Form) -> Figure:
        figure = form.figure(0.7 + 0.3 * len(stages))
        axes = figure.subplots()
        for row, (_, begin, end) in enumerate(stages):
            colour = SERIES[1] if begin else SERIES[2]
            axes.barh(row, abs(end - begin), 0.68, left=min(begin, end), color=colour)
            shown = number(end - begin, 2) if begin else number(end, 2)
            axes.annotate(
                f"{shown} h",
                (max(begin, end), row),
                (4, 0),
                textcoords="offset points",
                va="center",
            )
        _name_rows(axes, [name for name, _, _ in stages])
        axes.margins(x=0.22 if form.is_narrow else 0.12)
        axes.set_xlabel("hours")
        return figure

    hours = ", ".join(
        f"{name} {number(end - begin if begin else end, 2)}" for name, begin, end in stages
    )
    return drawn(draw, "hours", f"Hours from metadata to training: {hours}")


def step_bars(seconds: Mapping[str, float]) -> Drawing:
    """Draw the seconds of each step, first step on top."""

    def draw(form: Form) -> Figure:
        figure = form.figure(0.6 + 0.27 * len(seconds))
        axes = figure.subplots()
        bars = axes.barh(range(len(seconds)), list(seconds.values()), 0.7, color=SERIES[2])
        axes.bar_label(bars, [f"{value:,.1f} s" for value in seconds.values()], padding=4)
        _name_rows(axes, list(seconds))
        axes.margins(x=0.3 if form.is_narrow else 0.12)
        axes.set_xlabel("seconds")
        return figure

    times = ", ".join(f"{name} {value:,.1f}" for name, value in seconds.items())
    return drawn(draw, "steps", f"Bar chart of seconds a step: {times}")


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), [_short(name) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)  # the first one on top
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=False, axis="y")


def _short(name: str) -> str:
    shown = printable(name)
    return (
        shown if len(shown) <= MAX_LETTERS else f"{shown[: MAX_LETTERS - 1]}\N{HORIZONTAL ELLIPSIS}"
    )


def add_legend(figure: Figure, form: Form) -> None:
    """Name the series above the panels: on the right, or on a phone over the whole width."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if form.is_narrow:
        figure.legend(handles, labels, loc="outside upper left", ncols=2)
    else:
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
