"""Order and summarize word error rates for the page and the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from pipeline.runs.names import EVALUATED_MODELS

Report = Mapping[str, Any]
Scores = Mapping[str, Mapping[str, float]]

PAPER_WERR = {"DP1": 9.8, "DP2": 22.2, "DP3": 21.8, "DP4": 16.5, "DP5": 18.9}
"""Paper 003 Table II: relative word error rate reduction, percent, by device placement."""


def in_order(models: Iterable[str]) -> list[str]:
    """Order models: baseline, teacher, student; then any others as given."""
    names = list(models)
    return [name for name in EVALUATED_MODELS if name in names] + [
        name for name in names if name not in EVALUATED_MODELS
    ]


def placements(scores: Scores) -> list[str]:
    """Return the placements at which any model was evaluated, as given."""
    return list(dict.fromkeys(name for model in in_order(scores) for name in scores[model]))


def at_paper_placements(scores: Scores) -> bool:
    """Return whether the placements are the paper's DP1..DP5."""
    return set(placements(scores)) == set(PAPER_WERR)


def reductions(report: Report) -> dict[str, Mapping[str, float]]:
    """Return the student's WERR by placement, before and, where both models had it, after sMBR."""
    by_name = {"WERR": report.get("werr") or {}}
    if after := report.get("werr_smbr"):
        by_name["WERR after sMBR"] = after
    return by_name


def development_rates(report: Report) -> dict[str, float]:
    """Return each model's word error rate on the development speakers, as it was tuned."""
    found: Mapping[str, Mapping[str, float]] = report.get("development") or {}
    return {model: found[model]["wer"] for model in in_order(found)}


def mean(scores: Mapping[str, float]) -> float | None:
    """Return the mean over placements; None if there are none."""
    return fmean(scores.values()) if scores else None


def headline(report: Report) -> str:
    """State in one sentence the mean WERR, and whether the student is better at every placement."""
    reductions: Mapping[str, float] = report.get("werr") or {}
    if not reductions:
        return "This run has no word error rates yet: it has not been evaluated."
    overall = fmean(reductions.values())
    verb = "lowers" if overall >= 0 else "raises"
    change = f"the word error rate of the supervised baseline by {abs(overall):.1f} %"
    if len(reductions) == 1:
        return f"The student {verb} {change} (WERR)."
    start = f"Over {len(reductions)} placements the student {verb} {change} on average (mean WERR)"
    losses = [name for name, reduction in reductions.items() if not reduction > 0]
    if not losses:
        return f"{start}; it beats the baseline at every placement."
    return f"{start}; it does not beat the baseline at {_listing(losses)}."


def _listing(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
