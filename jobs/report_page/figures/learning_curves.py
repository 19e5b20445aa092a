"""Draw learning curves over the hours of speech that training has read."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from jobs.report_page.blocks import Drawing, printable
from jobs.report_page.figures.bars import add_legend
from jobs.report_page.figures.svg import FAINT, INK, SERIES, Form, drawn
from pipeline.filterbank import FRAME_SHIFT_MS
from pipeline.splicing import STACK

Curve = Sequence[Mapping[str, Any]]

HELD_OUT = "validation_cross_entropy"
SUB_EPOCHS = {
    True: ("labelled", "o", SERIES[2]),
    False: ("unlabelled", "s", SERIES[1]),
}
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


def hours_seen(curve: Curve) -> list[float]:
    """Return the hours that training has read at the end of each sub-epoch, repetitions too."""
    return [hours_of(frames) for frames in accumulate(point["num_frames"] for point in curve)]


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
    """Draw a model's cross-entropy and frame accuracy, in training and held out, by hours seen.

    `index` makes ids unique. Ticks on the axis are the ends of blocks.
    """
    ends = block_ends(curve, frames_in_block)

    def draw(form: Form) -> Figure:
        figure = form.figure(2.4, num_panels=2)
        upper, lower = figure.subplots(*form.grid(2))
        upper.set_title("cross-entropy, nats a frame", loc="left")
        _plot_sub_epochs(upper, curve, "cross_entropy", 1.0)
        _plot_held_out(upper, curve)
        lower.set_title("frame accuracy, %", loc="left")
        _plot_sub_epochs(lower, curve, "frame_accuracy", 100.0)
        for axes in (upper, lower):
            for hours in ends:
                axes.axvline(hours, 0, 0.04, color=FAINT if len(ends) > 60 else SERIES[0])
        if len(upper.get_legend_handles_labels()[0]) > 1:
            add_legend(figure, form)
        return figure

    return drawn(draw, f"curve-{index}", _curve_label(name, curve))


def trainer_curve(name: str, index: int, curve: Curve) -> Drawing | None:
    """Draw what a model's trainer exchanged by hours seen: density, norms and staleness.

    Numbers that are 0 throughout are left out: blocks that are sent whole leave no residual. None
    for synchronous SGD, which sends every gradient, and for reports before these.
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
        figure = form.figure(2.0, num_panels=len(shown))
        panels = figure.subplots(*form.grid(len(shown)), squeeze=False).flat
        for axes, key in zip(panels, shown, strict=True):
            axes.set_title(TRAINER_TITLES[key], loc="left")
            _plot_sub_epochs(axes, flat, key, 100.0 if key == "density" else 1.0)
            axes.set_ylim(bottom=0)
        return figure

    ends = {key: points[-1][key] * (100 if key == "density" else 1) for key in shown}
    values = ", ".join(f"{TRAINER_TITLES[key]} {ends[key]:.3g}" for key in shown)
    label = f"What the trainer of {printable(name)} exchanged; at the end: {values}"
    return drawn(draw, f"trainer-{index}", label)


def pace_curve(name: str, index: int, pace: Sequence[Mapping[str, float]]) -> Drawing:
    """Draw the hours of speech that a model's training read in an hour, by sub-epoch."""
    rates = [hours_of(each["num_frames"]) * 3600 / each["seconds"] for each in pace]

    def draw(form: Form) -> Figure:
        figure = form.figure(1.8)
        axes = figure.subplots()
        axes.bar([each["sub_epoch"] + 1 for each in pace], rates, 0.7, color=SERIES[2])
        axes.set_title("throughput, hours of speech an hour", loc="left")
        axes.set_xlabel("sub-epoch")
        axes.grid(visible=False, axis="x")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return figure

    label = f"Throughput of {printable(name)}: {min(rates):,.0f} to {max(rates):,.0f}"
    return drawn(draw, f"pace-{index}", f"{label} hours of speech an hour")


def _curve_label(name: str, curve: Curve) -> str:
    first, last = curve[0], curve[-1]
    return (
        f"Learning curves of {printable(name)}: in {len(curve)} sub-epochs the cross-entropy goes "
        f"from {first['cross_entropy']:.2f} to {last['cross_entropy']:.2f}, the frame accuracy "
        f"from {first['frame_accuracy']:.0%} to {last['frame_accuracy']:.0%}"
    )


def _plot_sub_epochs(axes: Axes, curve: Curve, key: str, scale: float) -> None:
    hours = hours_seen(curve)
    for labelled, (label, marker, colour) in SUB_EPOCHS.items():
        points = [
            (seen, scale * point[key])
            for seen, point in zip(hours, curve, strict=True)
            if point["labelled"] is labelled
        ]
        if points:
            seen_hours, values = zip(*points, strict=True)
            axes.plot(seen_hours, values, label=label, marker=marker, markersize=3.5, color=colour)
    axes.set_xlabel("hours of speech seen")
    axes.grid(visible=False, axis="x")


def _plot_held_out(axes: Axes, curve: Curve) -> None:
    points = [
        (seen, point[HELD_OUT])
        for seen, point in zip(hours_seen(curve), curve, strict=True)
        if HELD_OUT in point
    ]
    if points:
        hours, values = zip(*points, strict=True)
        axes.plot(hours, values, label="held out", linestyle="--", color=INK)
