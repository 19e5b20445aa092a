"""Draw the charts of the page, each for a desktop and for a phone, as inline SVG.

Each function takes values of the report and returns a Drawing. Colours and font are those of the
page.
"""

import io
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import matplotlib.style
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, NullFormatter, ScalarFormatter

from jobs.report_page.wording import Scores, by_placement, in_order, number, printable
from pipeline.filterbank import FRAME_SHIFT_MS, STACK
from pipeline.runs.names import BASELINE, STUDENT

INK, FAINT = "#000001", "#000002"
SERIES = ("#000003", "#000004", "#000005")
_PAGE_COLOURS = {
    INK: "var(--ink)",
    FAINT: "var(--line)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES, 1)},
}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megahour",
    "text.parse_math": False,  # names are untrusted, and a lone $ is no formula
    "font.size": 10,
    "lines.linewidth": 1.4,
    "axes.titlesize": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


@dataclass(frozen=True, slots=True)
class Drawing:
    """Drawing is one chart as two finished `<svg>` elements: for a desktop and for a phone."""

    wide: Markup
    narrow: Markup


@dataclass(frozen=True, slots=True)
class Form:
    """Form is a drawing's width in inches, and whether its panels are below each other."""

    width: float
    is_narrow: bool

    def panels(self, height: float, num_panels: int = 1) -> tuple[Figure, list[Axes]]:
        """Make a figure of so many empty panels, each `height` inches high."""
        rows, columns = (num_panels, 1) if self.is_narrow else (1, num_panels)
        figure = Figure(figsize=(self.width, rows * height))
        return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


FORMS = {"wide": Form(7.4, is_narrow=False), "narrow": Form(3.7, is_narrow=True)}
"""A phone shows the narrow form at its full size, where the wide one's letters would be 6 px."""


def drawn(draw: Callable[[Form], Figure], name: str, label: str) -> Drawing:
    """Draw both forms in the page's style, whatever the user's own matplotlib settings are.

    `name` makes the ids unique; `label` describes the drawing.
    """
    with matplotlib.style.context(_STYLE, after_reset=True), warnings.catch_warnings():
        # The browser has letters that matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing from")
        wide, narrow = (
            _inline_svg(draw(form), f"{name}-{kind}", printable(label))
            for kind, form in FORMS.items()
        )
    return Drawing(wide, narrow)


def _inline_svg(figure: Figure, name: str, label: str) -> Markup:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    root = ET.fromstring(buffer.getvalue())  # noqa: S314 - drawn in the line above
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        plain = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib = {key: _page_value(key, value, name) for key, value in plain.items()}
    root.attrib |= {"role": "img", "aria-label": label}
    # ElementTree has escaped every text and attribute of the drawing.
    return Markup(ET.tostring(root, encoding="unicode"))  # noqa: S704


def _page_value(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return f"#{name}-{value.removeprefix('#')}"
    for colour, variable in _PAGE_COLOURS.items():
        value = value.replace(colour, variable)
    return value.replace("url(#", f"url(#{name}-")


UPRIGHT_LETTERS_PER_INCH = 8
"""More letters than this do not fit side by side below an axis."""

MAX_LETTERS = 24
"""A longer name beside an axis would leave no room for its bars."""


def word_error_bars(wer: Scores) -> Drawing:
    """Draw word error rates, a group of bars for each placement."""
    models, names = in_order(wer), list(by_placement(wer))

    def draw(form: Form) -> Figure:
        figure, (axes,) = form.panels(2.9)
        width = 0.8 / len(models)
        for index, model in enumerate(models):
            centres = [place - 0.4 + (index + 0.5) * width for place in range(len(names))]
            rates = [wer[model].get(name, 0.0) for name in names]
            colour = SERIES[index % len(SERIES)]
            axes.bar(centres, rates, 0.92 * width, color=colour, label=_short(model))
        axes.set_title("word error rate, %", loc="left")
        _name_groups(axes, names, form)
        _add_legend(figure, form)
        return figure

    label = f"Bar chart of word error rates at {', '.join(names)} for {', '.join(models)}"
    return drawn(draw, "wer", f"{label}; the table above has the numbers")


def calibration_curves(confidence: Mapping[str, Mapping[str, Any]]) -> Drawing:
    """Draw the share of right words over their mean confidence, bin by bin, a line for each model.

    Words on the diagonal are as often right as their confidence says.
    """
    models = in_order(confidence)

    def draw(form: Form) -> Figure:
        figure, (axes,) = form.panels(3.2)
        axes.plot([0, 100], [0, 100], color=FAINT)
        for index, model in enumerate(models):
            bins = confidence[model]["bins"]
            axes.plot(
                [100 * each["mean_confidence"] for each in bins],
                [100 * each["num_correct"] / each["num_words"] for each in bins],
                label=_short(model),
                color=SERIES[index % len(SERIES)],
                linestyle="-" if index < len(SERIES) else "--",
                marker="o",
                markersize=3.5,
            )
        axes.set_title("correct words, %", loc="left")
        axes.set_xlabel("mean confidence of a bin, %")
        _add_legend(figure, form)
        return figure

    ends = ", ".join(
        f"{model} {number(100 * each['mean_confidence'])} and "
        f"{number(100 * each['num_correct'] / each['num_words'])}"
        for model, each in ((model, confidence[model]) for model in models)
    )
    label = f"Mean confidence of words and share of correct words, %: {ends}"
    return drawn(draw, "confidence", f"{label}; the table below has the bins")


def _name_groups(axes: Axes, names: Sequence[str], form: Form) -> None:
    axes.set_xticks(range(len(names)), [_short(name) for name in names])
    if sum(map(len, names)) > UPRIGHT_LETTERS_PER_INCH * form.width:
        for tick_label in axes.get_xticklabels():
            tick_label.set(rotation=30, ha="right")
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")


def speaker_points(rates: Sequence[tuple[str, float, float]]) -> Drawing:
    """Draw a line for each speaker from the rate of the baseline to that of the student, in %."""

    def draw(form: Form) -> Figure:
        figure, (axes,) = form.panels(1.0 + 0.21 * len(rates))
        rows = range(len(rates))
        names, before, after = zip(*rates, strict=True)
        axes.hlines(rows, before, after, color=FAINT, linewidth=2.5, zorder=1)
        axes.scatter(before, rows, color=SERIES[0], label=BASELINE, zorder=2)
        axes.scatter(after, rows, color=SERIES[2], label=STUDENT, zorder=3)
        _name_rows(axes, names)
        axes.set_xlabel("word error rate, %")
        _add_legend(figure, form)
        return figure

    ends = ", ".join(f"{name} {number(one)} to {number(two)}" for name, one, two in rates)
    return drawn(draw, "speakers", f"Word error rates of baseline and student by speaker: {ends}")


def hours_waterfall(stages: Sequence[tuple[str, float, float]]) -> Drawing:
    """Draw the hours before and after each stage, from metadata to training; totals begin at 0."""
    hours = [number(end - begin if begin else end, 2) for _, begin, end in stages]

    def draw(form: Form) -> Figure:
        figure, (axes,) = form.panels(0.7 + 0.3 * len(stages))
        for row, (_, begin, end) in enumerate(stages):
            colour = SERIES[1] if begin else SERIES[2]
            axes.barh(row, abs(end - begin), 0.68, left=min(begin, end), color=colour)
            at, above = (max(begin, end), row), (4, 0)
            axes.annotate(f"{hours[row]} h", at, above, textcoords="offset points", va="center")
        _name_rows(axes, [name for name, _, _ in stages])
        axes.margins(x=0.22 if form.is_narrow else 0.12)
        axes.set_xlabel("hours")
        return figure

    named = ", ".join(f"{stage[0]} {each}" for stage, each in zip(stages, hours, strict=True))
    return drawn(draw, "hours", f"Hours from metadata to training: {named}")


def step_bars(steps: Mapping[str, Mapping[str, float]]) -> Drawing:
    """Draw the seconds of each step, first step on top."""
    seconds = {name: step["seconds"] for name, step in steps.items()}

    def draw(form: Form) -> Figure:
        figure, (axes,) = form.panels(0.6 + 0.27 * len(seconds))
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
    if len(shown) <= MAX_LETTERS:
        return shown
    return f"{shown[: MAX_LETTERS - 1]}\N{HORIZONTAL ELLIPSIS}"


def _add_legend(figure: Figure, form: Form) -> None:
    """Name the series above the panels: on the right, or on a phone over the whole width."""
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if form.is_narrow:
        figure.legend(handles, labels, loc="outside upper left", ncols=2)
    else:
        figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))


Curve = Sequence[Mapping[str, Any]]

SUB_EPOCHS = {True: ("labelled", "o", SERIES[2]), False: ("unlabelled", "s", SERIES[1])}
TRAINER_TITLES = {
    "density": "gradients sent, %",
    "residual_norm": "norm of a rank's residual",
    "stripe_residual_norm": "norm of a stripe's residual",
    "block_update_norm": "norm of the block update",
    "block_residual_norm": "norm of a block's residual",
    "mean_staleness": "mean staleness, exchanges",
    "max_staleness": "largest staleness, exchanges",
}
MAX_BLOCKS = 150
"""More ends of blocks than this would be a grey bar."""

_HOURS_PER_FRAME = STACK * FRAME_SHIFT_MS / 3_600_000


def hours_of(num_frames: float) -> float:
    """Return the hours of so many low-rate frames."""
    return num_frames * _HOURS_PER_FRAME


def block_ends(curve: Curve, frames_in_block: int) -> list[float]:
    """Return the hours at which blocks end, of about so many frames of all ranks together.

    No ends where there is no block, or where there are too many to draw.
    """
    num_frames = sum(point["num_frames"] for point in curve)
    if not frames_in_block or num_frames / frames_in_block > MAX_BLOCKS:
        return []
    return [
        hours_of(frames_in_block * block) for block in range(1, num_frames // frames_in_block + 1)
    ]


def learning_curve(name: str, index: int, curve: Curve, frames_in_block: int = 0) -> Drawing:
    """Draw a model's cross-entropy and frame accuracy, in training and validation, by hours seen.

    `index` makes ids unique. Ticks on the axis are the ends of blocks.
    """
    ends = block_ends(curve, frames_in_block)

    def draw(form: Form) -> Figure:
        figure, (upper, lower) = form.panels(2.4, num_panels=2)
        upper.set_title("cross-entropy, nats a frame", loc="left")
        _plot_sub_epochs(upper, curve, "cross_entropy", 1.0)
        lower.set_title("frame accuracy, %", loc="left")
        _plot_sub_epochs(lower, curve, "frame_accuracy", 100.0)
        for axes in (upper, lower):
            for hours in ends:
                axes.axvline(hours, 0, 0.04, color=FAINT if len(ends) > 60 else SERIES[0])
        if len(upper.get_legend_handles_labels()[0]) > 1:
            _add_legend(figure, form)
        return figure

    first, last = curve[0], curve[-1]
    label = (
        f"Learning curves of {name}: in {len(curve)} sub-epochs the cross-entropy goes "
        f"from {first['cross_entropy']:.2f} to {last['cross_entropy']:.2f}, the frame accuracy "
        f"from {first['frame_accuracy']:.0%} to {last['frame_accuracy']:.0%}"
    )
    return drawn(draw, f"curve-{index}", label)


def validation_curves(here: Mapping[str, Curve], there: Mapping[str, Curve]) -> Drawing | None:
    """Draw the models' validation frame error rates by sub-epoch (000 Figure 2, 003's VAL).

    They are relative to the baseline's last one, in the run compared with where that has one.
    `there` has the curves of that run, {} without it. None where no baseline was validated.
    """
    rates = {
        name: [1 - each["validation_frame_accuracy"] for each in curve]
        for run, curves in (("", here), (" of the other run", there))
        for name, curve in ((f"{model}{run}", curves[model]) for model in in_order(curves))
        if curve and all("validation_frame_accuracy" in each for each in curve)
    }
    reference = rates.get(f"{BASELINE} of the other run") or rates.get(BASELINE)
    if reference is None or not reference[-1]:
        return None
    relative = {
        name: [100 * (rate / reference[-1] - 1) for rate in each] for name, each in rates.items()
    }

    def draw(form: Form) -> Figure:
        figure, (axes,) = form.panels(2.8)
        for index, (name, each) in enumerate(relative.items()):
            is_other = name.endswith("of the other run")
            axes.plot(
                range(1, len(each) + 1),
                each,
                label=name,
                color=SERIES[index % len(SERIES)],
                linestyle="--" if is_other else "-",
                marker="o",
                markersize=2.5,
            )
        axes.axhline(0, color=FAINT)
        axes.set_title("frame errors, % above the baseline's", loc="left")
        axes.set_xlabel("sub-epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _add_legend(figure, form)
        return figure

    ends = ", ".join(f"{name} {number(each[-1])} %" for name, each in relative.items())
    label = "Frame error rates in validation, relative to the baseline's last"
    return drawn(draw, "validation", f"{label}; at the end: {ends}")


def trainer_curve(name: str, index: int, curve: Curve) -> Drawing | None:
    """Draw what a model's trainer exchanged by hours seen: density, norms and staleness.

    Numbers that are 0 throughout are left out: blocks that are sent whole leave no residual. None
    for synchronous SGD, which sends every gradient.
    """
    points = [point.get("trainer", {}) for point in curve]
    shown = [
        key
        for key in TRAINER_TITLES
        if all(key in point for point in points) and any(point[key] for point in points)
    ]
    if not shown:
        return None
    flat = [{**point, **point["trainer"]} for point in curve]

    def draw(form: Form) -> Figure:
        figure, panels = form.panels(2.0, num_panels=len(shown))
        for axes, key in zip(panels, shown, strict=True):
            axes.set_title(TRAINER_TITLES[key], loc="left")
            _plot_sub_epochs(axes, flat, key, 100.0 if key == "density" else 1.0)
            axes.set_ylim(bottom=0)
        return figure

    ends = {key: points[-1][key] * (100 if key == "density" else 1) for key in shown}
    values = ", ".join(f"{TRAINER_TITLES[key]} {ends[key]:.3g}" for key in shown)
    label = f"What the trainer of {name} exchanged; at the end: {values}"
    return drawn(draw, f"trainer-{index}", label)


def pace_curve(name: str, index: int, pace: Sequence[Mapping[str, float]]) -> Drawing:
    """Draw the hours of speech that a model's training read in an hour, by sub-epoch."""
    rates = [hours_of(each["num_frames"]) * 3600 / each["seconds"] for each in pace]

    def draw(form: Form) -> Figure:
        figure, (axes,) = form.panels(1.8)
        axes.bar([each["sub_epoch"] + 1 for each in pace], rates, 0.7, color=SERIES[2])
        axes.set_title("throughput, hours of speech an hour", loc="left")
        axes.set_xlabel("sub-epoch")
        axes.grid(visible=False, axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return figure

    label = f"Throughput of {name}: {min(rates):,.0f} to {max(rates):,.0f}"
    return drawn(draw, f"pace-{index}", f"{label} hours of speech an hour")


def _plot_sub_epochs(axes: Axes, curve: Curve, key: str, scale: float) -> None:
    """Plot a value over the hours read by the end of each sub-epoch, and in validation, if any."""
    hours = [hours_of(frames) for frames in accumulate(point["num_frames"] for point in curve)]
    points = list(zip(hours, curve, strict=True))

    def plot(some: list[tuple[float, float]], style: Mapping[str, Any]) -> None:
        if some:
            axes.plot(*zip(*some, strict=True), **style)

    for labelled, (label, marker, colour) in SUB_EPOCHS.items():
        of_kind = [(at, scale * each[key]) for at, each in points if each["labelled"] is labelled]
        plot(of_kind, {"label": label, "marker": marker, "markersize": 3.5, "color": colour})
    name = f"validation_{key}"
    validated = [(at, scale * each[name]) for at, each in points if name in each]
    plot(validated, {"label": "validation", "linestyle": "--", "color": INK})
    axes.set_xlabel("hours of speech seen")
    axes.grid(visible=False, axis="x")


KBEST_FORMS = {"renormalized": "renormalized", "ghost": "ghost", "sampled": "a fifth of k drawn"}
"""How targets represent the senones that they do not keep, each with its title."""


def kbest_costs(by_k: Mapping[str, Mapping[str, float]]) -> Drawing:
    """Draw the retained mass, and the angle of each form's gradient, over k."""
    ordered = {k: by_k[k] for k in sorted(by_k, key=int)}

    def draw(form: Form) -> Figure:
        figure, (upper, lower) = form.panels(2.5, num_panels=2)
        masses = [100 * costs["mass"] for costs in ordered.values()]
        upper.plot(list(ordered), masses, marker="o", color=SERIES[2])
        upper.set_title("retained mass, %", loc="left")
        lower.set_title("angle to the full gradient, degrees", loc="left")
        for colour, (name, title) in zip(SERIES, KBEST_FORMS.items(), strict=True):
            key = f"angle_{name}"
            angles = {k: costs[key] for k, costs in ordered.items() if key in costs}
            lower.plot(list(angles), list(angles.values()), marker="o", color=colour, label=title)
        for axes in (upper, lower):
            axes.set_xlabel("k")
            axes.grid(visible=False, axis="x")
        lower.legend(fontsize="small")
        return figure

    label = f"Retained mass and angles of gradients at k of {', '.join(ordered)}"
    return drawn(draw, "kbest", f"{label}; the table above has the numbers")


def rates_by_hours(points: Sequence[Mapping[str, Any]]) -> Drawing:
    """Draw the rates of runs, ordered by their unlabelled hours, over a logarithm of the hours."""
    hours = [point["hours"] for point in points]

    def draw(form: Form) -> Figure:
        figure, (axes,) = form.panels(3.0)
        for model, colour in ((BASELINE, SERIES[0]), (STUDENT, SERIES[2])):
            rates = [point["wer"][model] for point in points]
            axes.errorbar(
                hours,
                [rate["value"] for rate in rates],
                [
                    [rate["value"] - rate["low"] for rate in rates],
                    [rate["high"] - rate["value"] for rate in rates],
                ],
                label=model,
                color=colour,
                marker="o",
                markersize=3.5,
                capsize=2.5,
            )
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(hours)
        axes.set_title("word error rate, %", loc="left")
        axes.set_xlabel("hours of unlabelled speech")
        _add_legend(figure, form)
        return figure

    ends = ", ".join(
        f"{number(point['hours'], 2)} h {number(point['wer'][STUDENT]['value'])} %"
        for point in points
    )
    label = f"Word error rates of the student by hours of unlabelled speech: {ends}"
    return drawn(draw, "by-hours", label)
