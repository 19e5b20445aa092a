"""Show how sure word error rates are: intervals and tests over speakers, the worst utterances."""

from collections.abc import Mapping
from typing import Any

from jobs.report_page.blocks import (
    AlignedUtterance,
    Alignments,
    Figure,
    Row,
    Table,
    WordPair,
    counted,
    grouped_table,
    number,
    table,
)
from jobs.report_page.figures import speaker_points
from jobs.report_page.tables import Report, in_order
from pipeline.runs.names import BASELINE, STUDENT

MAX_SPEAKERS = 100
"""The page shows so many speakers at most, those with the most errors of the student first."""

MAX_DRAWN = 40
"""The page draws so many speakers at most."""

POOLED = "all together"
Estimate = Mapping[str, float | None]


def pooled_comparison(report: Report) -> Mapping[str, Any]:
    """Return the comparison of student and baseline over all words; nothing in older reports."""
    return _comparison(_statistics(report).get("pooled") or {}, BASELINE, STUDENT)


def certainty(report: Report) -> str:
    """State the student's pooled WERR with its interval and its test; "" for older reports."""
    found = pooled_comparison(report)
    if not found:
        return ""
    pooled = _statistics(report)["pooled"]
    speakers = f"{pooled['num_speakers']:,} speakers and {pooled['reference_words']:,} words"
    level, (low, high) = _statistics(report)["level"], bounds(found["reduction"])
    return (
        f"Over {speakers} together the WERR is {number(found['reduction']['value'])} %, with a "
        f"{level} % interval from {low} to {high} %. If both models were equally good, a "
        f"difference as large would come about with probability {probability(found['p_value'])}."
    )


def interval_table(report: Report) -> Table | None:
    """Tabulate each model's word error rate and its WERR, with intervals, at each placement."""
    statistics = _statistics(report)
    if not statistics:
        return None
    at = dict(statistics["by_placement"])
    if len(at) != 1:
        at[POOLED] = statistics["pooled"]
    groups = {
        name: [_interval_row(found, model) for model in _models(found)]
        for name, found in at.items()
    }
    header = ["Placement", "Model", "WER", "interval", "WERR", "interval", "p"]
    caption = (
        f"Word error rates and WERR against the baseline, %, with {statistics['level']} % "
        f"intervals of {statistics['num_resamples']:,} draws of speakers, and the exact "
        "permutation test over speakers"
    )
    return grouped_table(caption, header, groups)


def _models(found: Mapping[str, Any]) -> list[str]:
    return in_order(found["wer"])


def _interval_row(found: Mapping[str, Any], model: str) -> Row:
    rate: Estimate = found["wer"][model]
    row = [model, number(rate["value"]), " to ".join(bounds(rate))]
    gained = _comparison(found, BASELINE, model)
    if not gained:
        return [*row, "", "", ""]
    reduction = gained["reduction"]
    interval = " to ".join(bounds(reduction))
    return [*row, number(reduction["value"]), interval, probability(gained["p_value"])]


def speaker_table(report: Report) -> Table | None:
    """Tabulate the word error rates of each speaker, the worst of the student's first."""
    rates = _speaker_rates(report)
    if not rates:
        return None
    models = in_order(next(iter(rates.values())))
    worst = list(rates)[:MAX_SPEAKERS]
    speakers = report["speakers"]
    rows = [
        [
            name,
            *(number(rates[name][model]) for model in models),
            number(speakers[name]["reference_words"], 0),
        ]
        for name in worst
    ]
    caption = "Word error rates by speaker, %"
    if len(worst) < len(rates):
        caption += f"; {len(worst)} of {len(rates):,} speakers"
    return table(caption, ["Speaker", *models, "reference words"], rows)


def speaker_figure(report: Report) -> Figure | None:
    """Draw baseline and student by speaker; None where either is missing, or one speaker alone."""
    points = [
        (name, rates[BASELINE], rates[STUDENT])
        for name, rates in _speaker_rates(report).items()
        if rates.keys() >= {BASELINE, STUDENT}
    ]
    if len(points) < 2:
        return None
    gains = sum(student < baseline for _, baseline, student in points)
    losses = sum(student > baseline for _, baseline, student in points)
    caption = (
        f"The student makes fewer errors than the baseline for {gains} of {len(points):,} "
        f"speakers, and more for {losses}"
    )
    if len(points) > MAX_DRAWN:
        caption += f"; the {MAX_DRAWN} speakers with the highest rates of the student are drawn"
    return Figure(speaker_points(points[:MAX_DRAWN]), caption)


def _speaker_rates(report: Report) -> dict[str, dict[str, float]]:
    """Return each model's rate by speaker, in percent, the worst of the student's first."""
    speakers: Mapping[str, Mapping[str, Any]] = report.get("speakers") or {}
    rates = {name: _rates(counts) for name, counts in speakers.items() if counts["reference_words"]}
    worst = sorted(rates, key=lambda name: (-rates[name].get(STUDENT, 0.0), name))
    return {name: rates[name] for name in worst}


def _rates(counts: Mapping[str, Any]) -> dict[str, float]:
    words = counts["reference_words"]
    return {model: 100 * errors / words for model, errors in counts["errors"].items()}


def worst_utterances(report: Report) -> Alignments | None:
    """Show the utterances with the most errors, each transcript above what was decoded."""
    worst: Mapping[str, Any] = report.get("worst") or {}
    utterances = tuple(map(_aligned, worst.get("utterances", ())))
    if not utterances:
        return None
    return Alignments(f"The utterances with the most errors of {worst['model']}", utterances)


def _aligned(utterance: Mapping[str, Any]) -> AlignedUtterance:
    counts = utterance["word_errors"]
    errors = sum(counts[kind] for kind in ("substitutions", "insertions", "deletions"))
    name = f"{utterance['utterance_id']} ({utterance['speaker_id']}, {utterance['placement']})"
    title = f"{name}: {counted(errors, 'error')} in {counted(counts['reference_words'], 'word')}"
    return AlignedUtterance(title, tuple(WordPair(*pair) for pair in utterance["words"]))


def _statistics(report: Report) -> Mapping[str, Any]:
    return report.get("statistics") or {}


def _comparison(found: Mapping[str, Any], baseline: str, system: str) -> Mapping[str, Any]:
    """Return the comparison of two models; nothing if there is none."""
    for each in found.get("comparisons", ()):
        if (each["baseline"], each["system"]) == (baseline, system):
            compared: Mapping[str, Any] = each
            return compared
    return {}


def bounds(estimate: Estimate) -> tuple[str, str]:
    """Write both ends of an interval; one speaker alone bounds nothing."""
    low, high = estimate["low"], estimate["high"]
    return (
        "\N{MINUS SIGN}\N{INFINITY}" if low is None else number(low),
        "\N{INFINITY}" if high is None else number(high),
    )


def probability(value: float) -> str:
    """Write a p-value; one below 0.0001 is said to be."""
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}" if value < 0.01 else f"{value:.2f}"
