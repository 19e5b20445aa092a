"""Show what the targets' k costs, and the certificate of the shuffle.

The costs of k are a table, a plot, and a warning where it keeps too little of the probability. The
certificate is a verdict, a table and a note.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jobs.report_page.blocks import Cell, Drawing, Row, Table, grouped_table, number
from jobs.report_page.figures import SERIES, Form, drawn
from jobs.report_page.tables import Report
from pipeline.shuffle_quality import NUM_ORDERS

LEAST_MASS = 0.95
"""A retained mass below this is worth a warning: a twentieth of the probability is not stored."""

KBEST_FORMS = {
    "renormalized": "renormalized",
    "ghost": "ghost",
    "sampled": "a fifth of k drawn",
}
Means = Mapping[str, Any]


def costs_table(report: Report) -> Table | None:
    """Tabulate the costs of each k and form, in all and by placement."""
    groups: dict[str, list[Row]] = {
        f"{name}, {number(means['num_frames'], 0)} frames": [
            _costs_row(int(k), means["k"][k]) for k in sorted(means["k"], key=int)
        ]
        for name, means in _parts(report).items()
    }
    columns = [f"{what}, {form}" for what in ("error", "angle") for form in KBEST_FORMS.values()]
    header = ["Placement", "k", "mass, %", "agreement, %", *columns]
    return grouped_table("What storing k columns a frame costs", header, groups)


def costs_drawing(report: Report) -> Drawing | None:
    """Draw mass, and each form's angle, over k, in all placements; None without any."""
    means = _parts(report).get("all")
    if not means:
        return None
    by_k = {k: means["k"][k] for k in sorted(means["k"], key=int)}

    def draw(form: Form) -> Figure:
        figure = form.figure(2.5, num_panels=2)
        upper, lower = figure.subplots(*form.grid(2))
        masses = [100 * costs["mass"] for costs in by_k.values()]
        upper.plot(list(by_k), masses, marker="o", color=SERIES[2])
        upper.set_title("retained mass, %", loc="left")
        lower.set_title("angle to the full gradient, degrees", loc="left")
        _plot_forms(lower, by_k)
        for axes in (upper, lower):
            axes.set_xlabel("k")
            axes.grid(visible=False, axis="x")
        lower.legend(fontsize="small")
        return figure

    label = f"Retained mass and angles of gradients at k of {', '.join(by_k)}"
    return drawn(draw, "kbest", f"{label}; the table above has the numbers")


def _plot_forms(axes: Axes, by_k: Mapping[str, Means]) -> None:
    for index, (form, title) in enumerate(KBEST_FORMS.items()):
        shown = {k: costs[f"angle_{form}"] for k, costs in by_k.items() if f"angle_{form}" in costs}
        axes.plot(list(shown), list(shown.values()), marker="o", color=SERIES[index], label=title)


def costs_warning(report: Report) -> str:
    """Warn of the placements where the recipe's k keeps too little; empty where none is."""
    k = (report.get("targets") or {}).get("k")
    masses = {
        name: means["k"][str(k)]["mass"]
        for name, means in (report.get("kbest_costs") or {}).get("by_placement", {}).items()
        if str(k) in means["k"]
    }
    low = [f"{name} ({100 * mass:.1f} %)" for name, mass in masses.items() if mass < LEAST_MASS]
    if not low:
        return ""
    return (
        f"Warning: at k = {k} the targets hold less than {LEAST_MASS:.0%} of the teacher's "
        f"probability at {', '.join(low)}. Raise targets.k, or try targets.tail_samples or "
        "student.soft_targets = 'ghost', which do not renormalize."
    )


def costs_note(report: Report) -> str:
    """Explain the figures; empty without any."""
    if not _parts(report):
        return ""
    return (
        "Measured on a sample of the unlabelled features, of the logits of teacher and student. "
        "Agreement: the student's best senone is among the teacher's k best. Error: how far the "
        "best probability of a model that fits the targets is from the teacher's, on average. "
        "Angle: between a frame's gradient and that of all logits, in degrees; a drawn tail is "
        "right on average over frames, though not in each."
    )


def _parts(report: Report) -> Mapping[str, Means]:
    found = report.get("kbest_costs") or {}
    # Without a frame that the teachers label there are no costs.
    if "all" not in found:
        return {}
    # A corpus without placements has one, which evaluations name "all".
    return {"all": found["all"], **found["by_placement"]}


def _costs_row(k: int, costs: Means) -> Sequence[Cell | str]:
    shares = [number(100 * costs["mass"], 2), number(100 * costs["agreement"], 2)]
    errors = [number(costs.get(f"calibration_error_{form}"), 4) for form in KBEST_FORMS]
    return [str(k), *shares, *errors, *(number(costs.get(f"angle_{form}")) for form in KBEST_FORMS)]


NAMES = {
    "effective_files": "effective source files",
    "effective_speakers": "effective speakers",
    "design_effect": "design effect",
    "predicted_design_effect": "design effect, predicted",
    "autocorrelation_1": "autocorrelation, next minibatch",
    "autocorrelation_4": "autocorrelation, lag 4",
    "autocorrelation_16": "autocorrelation, lag 16",
    "mean_displacement": "mean displacement",
    "median_displacement": "median displacement",
}
FORMS = {"chunks": "chunks", "whole_utterances": "whole utterances"}
IS_BETTER_HIGH = frozenset(
    name for name in NAMES if name.startswith("effective") or name.endswith("displacement")
)
"""Figures that fall where an order is less mixed; the others rise."""
MINIBATCHES = {"step": "a step", "rank": "a rank"}


Measured = Mapping[str, float | None]


def shuffle_table(report: Report) -> Table | None:
    """Make a table of the figures of steps' and ranks' minibatches, beside uniform orders."""
    groups: dict[str, list[Row]] = {}
    for group, name, figure in _figures(report):
        groups.setdefault(group, []).append(_shuffle_row(name, figure))
    header = ["Minibatches", "Figure", "measured", "uniform", "lowest uniform", "highest uniform"]
    return grouped_table("The order that the student's trainer reads", header, groups)


def shuffle_verdict(report: Report) -> str:
    """Say how many figures leave the range of uniform orders, and which are less mixed."""
    found = list(_figures(report))
    if not found:
        return ""
    outside = [(group, name) for group, name, figure in found if outside_of(name, figure)]
    range_ = f"the range of {NUM_ORDERS} uniform orders"
    if not outside:
        return f"Verdict: all {len(found)} figures lie within {range_}."
    worse = [
        f"{NAMES[name]} ({group})"
        for group, name, figure in found
        if outside_of(name, figure) == "worse"
    ]
    chance = 2 / (NUM_ORDERS + 1)
    named = f"Less mixed than any of them: {', '.join(worse)}." if worse else "None is less mixed."
    return (
        f"Verdict: {len(outside)} of {len(found)} figures lie outside {range_}; of a uniform "
        f"order about {chance * len(found):.0f} would. {named}"
    )


def outside_of(name: str, figure: Measured) -> str:
    """Return "worse" or "better" where a figure leaves the range of uniform orders, else ""."""
    measured, low, high = (figure[key] for key in ("measured", "uniform_low", "uniform_high"))
    if measured is None:
        return ""
    is_low, is_high = low is not None and measured < low, high is not None and measured > high
    if not (is_low or is_high):
        return ""
    return "better" if is_high == (name in IS_BETTER_HIGH) else "worse"


def _figures(report: Report) -> Iterator[tuple[str, str, Measured]]:
    """Yield each figure below the title of its minibatches."""
    certificate: Mapping[str, Any] = report.get("certificate") or {}
    for form, title in FORMS.items():
        for minibatch, whose in MINIBATCHES.items():
            figures = certificate.get(form, {}).get(minibatch, {})
            for name in NAMES:
                if name in figures:
                    yield f"{title}, minibatches of {whose}", name, figures[name]


def shuffle_note(report: Report) -> str:
    """Explain the samples examined and the meaning of the figures."""
    certificate: Mapping[str, Any] = report.get("certificate") or {}
    if not certificate:
        return ""
    whole = certificate["uniform_run"]
    counts = ", ".join(
        f"{number(certificate[form]['num_samples'], 0)} {title} in "
        f"{number(certificate[form]['num_steps'], 0)} steps"
        for form, title in FORMS.items()
        if form in certificate
    )
    return (
        f"Looked at: {counts} of {certificate['num_ranks']} ranks. Effective: one over the chance "
        "that two samples of a minibatch share a source file or a speaker; a uniform order of the "
        f"whole run has {number(whole['effective_files'])} files and "
        f"{number(whole['effective_speakers'])} speakers. Design effect: the variance of the means "
        "of minibatches (of the log Z of the teacher) over that of independent samples. Marked: "
        "! is less mixed than every uniform order that was tried, \N{BLACK UP-POINTING TRIANGLE} "
        "more."
    )


def _shuffle_row(name: str, figure: Measured) -> Row:
    where = outside_of(name, figure)
    # A mark besides the colour, for print and for those who do not see it.
    mark = {"": "", "worse": " \N{EXCLAMATION MARK}", "better": " \N{BLACK UP-POINTING TRIANGLE}"}
    measured = Cell(number(figure["measured"], 2) + mark[where], where)
    uniform = (number(figure[key], 2) for key in ("uniform", "uniform_low", "uniform_high"))
    return [NAMES[name], measured, *uniform]
