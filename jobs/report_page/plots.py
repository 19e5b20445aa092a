"""Draw the plots of the page."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jobs.report_page.markup import printable
from jobs.report_page.scores import Scores, in_order, placements
from jobs.report_page.svg import SERIES, inline_svg, page_style

WIDTH_INCHES = 7.4
UPRIGHT_LETTERS = 60
"""More letters than this do not fit side by side below an axis."""
SUB_EPOCHS = {
    True: ("labelled sub-epochs", "o", SERIES[2]),
    False: ("unlabelled sub-epochs", "s", SERIES[1]),
}
TRAINER_TITLES = {
    "density": "gradients sent, %",
    "residual_norm": "norm of a rank's residual",
    "block_update_norm": "norm of the block update",
}
Curve = Sequence[Mapping[str, Any]]


def word_error_bars(wer: Scores) -> str:
    """Draw word error rates, a group of bars for each placement."""
    models, names = in_order(wer), placements(wer)
    with page_style():
        figure = Figure(figsize=(WIDTH_INCHES, 2.9))
        axes = figure.subplots()
        width = 0.8 / len(models)
        for index, model in enumerate(models):
            centres = [place - 0.4 + (index + 0.5) * width for place in range(len(names))]
            rates = [wer[model].get(name, 0.0) for name in names]
            colour = SERIES[index % len(SERIES)]
            axes.bar(centres, rates, 0.92 * width, color=colour, label=printable(model))
        axes.set_title("word error rate, %", loc="left")
        _name_groups(axes, names)
        _legend(figure)
        label = f"Bar chart of word error rates at {', '.join(names)} for {', '.join(models)}"
        return inline_svg(figure, "wer", f"{printable(label)}; the table above has the numbers")


def _name_groups(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), [printable(name) for name in names])
    if sum(map(len, names)) > UPRIGHT_LETTERS:
        for tick_label in axes.get_xticklabels():
            tick_label.set(rotation=30, ha="right")
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=False, axis="x")


def learning_curve(name: str, index: int, curve: Curve) -> str:
    """Draw a model's cross-entropy and frame accuracy by sub-epoch; `index` makes ids unique."""
    with page_style():
        figure = Figure(figsize=(WIDTH_INCHES, 2.6))
        figure.suptitle(printable(name), x=0.008, ha="left", weight="bold", size="medium")
        left, right = figure.subplots(1, 2)
        left.set_title("cross-entropy, nats a frame", loc="left")
        _plot_sub_epochs(left, curve, "cross_entropy", 1.0)
        right.set_title("frame accuracy, %", loc="left")
        _plot_sub_epochs(right, curve, "frame_accuracy", 100.0)
        if len({point["labelled"] for point in curve}) > 1:
            _legend(figure)
        return inline_svg(figure, f"curve-{index}", _curve_label(name, curve))


def trainer_curve(name: str, index: int, curve: Curve) -> str:
    """Draw what a model's trainer exchanged by sub-epoch: density and norms, as far as it has them.

    An empty text for synchronous SGD, which sends every gradient, and for reports before these.
    """
    points = [point.get("trainer", {}) for point in curve]
    shown = [key for key in TRAINER_TITLES if all(key in point for point in points)]
    if not shown:
        return ""
    with page_style():
        figure = Figure(figsize=(WIDTH_INCHES, 2.3))
        panels = figure.subplots(1, len(shown), squeeze=False)[0]
        for axes, key in zip(panels, shown, strict=True):
            axes.set_title(TRAINER_TITLES[key], loc="left")
            flat = [{**point, **point["trainer"]} for point in curve]
            _plot_sub_epochs(axes, flat, key, 100.0 if key == "density" else 1.0)
            axes.set_ylim(bottom=0)
        ends = {key: points[-1][key] * (100 if key == "density" else 1) for key in shown}
        values = ", ".join(f"{TRAINER_TITLES[key]} {ends[key]:.3g}" for key in shown)
        label = f"What the trainer of {printable(name)} exchanged; at the end: {printable(values)}"
        return inline_svg(figure, f"trainer-{index}", label)


def _curve_label(name: str, curve: Curve) -> str:
    first, last = curve[0], curve[-1]
    return (
        f"Learning curves of {printable(name)}: in {len(curve)} sub-epochs the cross-entropy goes "
        f"from {first['cross_entropy']:.2f} to {last['cross_entropy']:.2f}, the frame accuracy "
        f"from {first['frame_accuracy']:.0%} to {last['frame_accuracy']:.0%}"
    )


def _plot_sub_epochs(axes: Axes, curve: Curve, key: str, scale: float) -> None:
    for labelled, (label, marker, colour) in SUB_EPOCHS.items():
        points = [
            (sub_epoch, scale * point[key])
            for sub_epoch, point in enumerate(curve, 1)
            if point["labelled"] is labelled
        ]
        if points:
            sub_epochs, values = zip(*points, strict=True)
            axes.plot(sub_epochs, values, label=label, marker=marker, markersize=3.5, color=colour)
    axes.set_xlabel("sub-epoch")
    axes.grid(visible=False, axis="x")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def step_bars(seconds: Mapping[str, float]) -> str:
    """Draw the seconds of each step, first step on top."""
    with page_style():
        figure = Figure(figsize=(WIDTH_INCHES, 0.6 + 0.27 * len(seconds)))
        axes = figure.subplots()
        names = [printable(name) for name in seconds]
        bars = axes.barh(range(len(names)), list(seconds.values()), 0.7, color=SERIES[2])
        axes.bar_label(bars, [f"{value:,.1f} s" for value in seconds.values()], padding=4)
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.set_xlabel("seconds")
        times = ", ".join(f"{name} {value:,.1f}" for name, value in seconds.items())
        return inline_svg(figure, "steps", f"Bar chart of seconds a step: {printable(times)}")


def _legend(figure: Figure) -> None:
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels))
