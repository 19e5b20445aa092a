"""Show what the targets' k costs: a table, a plot over k, a warning where it keeps too little."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jobs.report_page.blocks import Cell, Drawing, Row, Table, grouped_table, number
from jobs.report_page.figures.svg import SERIES, Form, drawn
from jobs.report_page.scores import Report

LEAST_MASS = 0.95
"""A retained mass below this is worth a warning: a twentieth of the probability is not stored."""

FORMS = {
    "renormalized": "renormalized",
    "ghost": "ghost",
    "sampled": "a fifth of k drawn",
}
Means = Mapping[str, Any]


def costs_table(report: Report) -> Table | None:
    """Tabulate the costs of each k and form, in all and by placement."""
    groups: dict[str, list[Row]] = {
        f"{name}, {number(means['num_frames'], 0)} frames": [
            _row(int(k), means["k"][k]) for k in sorted(means["k"], key=int)
        ]
        for name, means in _parts(report).items()
    }
    columns = [f"{what}, {form}" for what in ("error", "angle") for form in FORMS.values()]
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
    for index, (form, title) in enumerate(FORMS.items()):
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


def _row(k: int, costs: Means) -> Sequence[Cell | str]:
    shares = [number(100 * costs["mass"], 2), number(100 * costs["agreement"], 2)]
    errors = [number(costs.get(f"calibration_error_{form}"), 4) for form in FORMS]
    return [str(k), *shares, *errors, *(number(costs.get(f"angle_{form}")) for form in FORMS)]
