"""Show the certificate of the shuffle: its verdict, a table, and a note."""

from collections.abc import Iterator, Mapping
from typing import Any

from jobs.report_page.blocks import Cell, Row, Table, grouped_table, number
from jobs.report_page.scores import Report
from pipeline.shuffle_quality import NUM_ORDERS

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


Figure = Mapping[str, float | None]


def shuffle_table(report: Report) -> Table | None:
    """Make a table of the figures of steps' and ranks' minibatches, beside uniform orders."""
    groups: dict[str, list[Row]] = {}
    for group, name, figure in _figures(report):
        groups.setdefault(group, []).append(_row(name, figure))
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


def outside_of(name: str, figure: Figure) -> str:
    """Return "worse" or "better" where a figure leaves the range of uniform orders, else ""."""
    measured, low, high = (figure[key] for key in ("measured", "uniform_low", "uniform_high"))
    if measured is None:
        return ""
    is_low, is_high = low is not None and measured < low, high is not None and measured > high
    if not (is_low or is_high):
        return ""
    return "better" if is_high == (name in IS_BETTER_HIGH) else "worse"


def _figures(report: Report) -> Iterator[tuple[str, str, Figure]]:
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


def _row(name: str, figure: Figure) -> Row:
    where = outside_of(name, figure)
    # A mark besides the colour, for print and for those who do not see it.
    mark = {"": "", "worse": " \N{EXCLAMATION MARK}", "better": " \N{BLACK UP-POINTING TRIANGLE}"}
    measured = Cell(number(figure["measured"], 2) + mark[where], where)
    uniform = (number(figure[key], 2) for key in ("uniform", "uniform_low", "uniform_high"))
    return [NAMES[name], measured, *uniform]
