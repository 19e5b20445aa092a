"""Show the certificate of the shuffle as a table and a note of the page."""

from collections.abc import Mapping
from typing import Any

from jobs.report_page.markup import Row, grouped_table, number
from jobs.report_page.scores import Report

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
MINIBATCHES = {"step": "a step", "rank": "a rank"}


def shuffle_table(report: Report) -> str:
    """Make a table of the figures of steps' and ranks' minibatches, beside uniform orders."""
    certificate: Mapping[str, Any] = report.get("certificate") or {}
    groups: dict[str, list[Row]] = {}
    for form, title in FORMS.items():
        for minibatch, whose in MINIBATCHES.items():
            figures = certificate.get(form, {}).get(minibatch, {})
            rows: list[Row] = [
                _row(NAMES[name], figures[name]) for name in NAMES if name in figures
            ]
            groups[f"{title}, minibatches of {whose}"] = rows
    header = ["Minibatches", "Figure", "measured", "uniform", "lowest uniform", "highest uniform"]
    return grouped_table("The order that the student's trainer reads", header, groups)


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
        "of minibatches (of the log Z of the teacher) over that of independent samples."
    )


def _row(name: str, figure: Mapping[str, float | None]) -> Row:
    keys = ("measured", "uniform", "uniform_low", "uniform_high")
    return [name, *(number(figure[key], 2) for key in keys)]
