"""Show how sure word error rates are: intervals and tests over speakers, the worst utterances."""

from collections.abc import Mapping, Sequence
from typing import Any

from jobs.report_page.markup import Row, details, grouped_table, number, table
from jobs.report_page.scores import Report, in_order
from pipeline.runs.names import BASELINE, STUDENT

MAX_SPEAKERS = 100
"""The page shows so many speakers at most, those with the most errors of the student first."""

POOLED = "all together"
_GAP = "*"
Estimate = Mapping[str, float | None]


def certainty(report: Report) -> str:
    """State the student's pooled WERR with its interval and its test; "" for older reports."""
    pooled = _statistics(report).get("pooled") or {}
    found = _comparison(pooled, BASELINE, STUDENT)
    if not found:
        return ""
    speakers = f"{pooled['num_speakers']:,} speakers and {pooled['reference_words']:,} words"
    level, (low, high) = _statistics(report)["level"], _bounds(found["reduction"])
    return (
        f"Over {speakers} together the WERR is {number(found['reduction']['value'])} %, with a "
        f"{level} % interval from {low} to {high} %. If both models were equally good, a "
        f"difference as large would come about with probability {_probability(found['p_value'])}."
    )


def interval_table(report: Report) -> str:
    """Tabulate each model's word error rate and its WERR, with intervals, at each placement."""
    statistics = _statistics(report)
    if not statistics:
        return ""
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
    row = [model, number(rate["value"]), " to ".join(_bounds(rate))]
    gained = _comparison(found, BASELINE, model)
    if not gained:
        return [*row, "", "", ""]
    reduction = gained["reduction"]
    bounds = " to ".join(_bounds(reduction))
    return [*row, number(reduction["value"]), bounds, _probability(gained["p_value"])]


def speaker_table(report: Report) -> str:
    """Tabulate the word error rates of each speaker, the worst of the student's first."""
    speakers: Mapping[str, Mapping[str, Any]] = report.get("speakers") or {}
    rates = {name: _rates(counts) for name, counts in speakers.items() if counts["reference_words"]}
    if not rates:
        return ""
    models = in_order(next(iter(rates.values())))
    worst = sorted(rates, key=lambda name: (-rates[name].get(STUDENT, 0.0), name))[:MAX_SPEAKERS]
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


def _rates(counts: Mapping[str, Any]) -> dict[str, float]:
    words = counts["reference_words"]
    return {model: 100 * errors / words for model, errors in counts["errors"].items()}


def worst_utterances(report: Report) -> str:
    """Show the utterances with the most errors, each transcript above what was decoded."""
    worst: Mapping[str, Any] = report.get("worst") or {}
    if not worst.get("utterances"):
        return ""
    blocks = "\n\n".join(map(_aligned, worst["utterances"]))
    return details(f"The utterances with the most errors of {worst['model']}", blocks)


def _aligned(utterance: Mapping[str, Any]) -> str:
    counts = utterance["word_errors"]
    errors = sum(counts[kind] for kind in ("substitutions", "insertions", "deletions"))
    pairs: Sequence[Sequence[str]] = utterance["words"]
    widths = [max(1, *map(len, pair)) for pair in pairs]
    # As sclite: capitals where the two differ would change the words, so a mark is below them.
    lines = [
        " ".join(
            (pair[side] or _GAP).ljust(width) for pair, width in zip(pairs, widths, strict=True)
        )
        for side in (0, 1)
    ]
    marks = " ".join(
        ("" if one == other else "!").ljust(width)
        for (one, other), width in zip(pairs, widths, strict=True)
    )
    name = f"{utterance['utterance_id']} ({utterance['speaker_id']}, {utterance['placement']})"
    return "\n".join(
        (
            f"{name}: {errors} errors in {counts['reference_words']} words",
            f"  transcript {lines[0]}".rstrip(),
            f"  decoded    {lines[1]}".rstrip(),
            f"             {marks}".rstrip(),
        )
    )


def _statistics(report: Report) -> Mapping[str, Any]:
    return report.get("statistics") or {}


def _comparison(found: Mapping[str, Any], baseline: str, system: str) -> Mapping[str, Any]:
    """Return the comparison of two models; nothing if there is none."""
    for each in found.get("comparisons", ()):
        if (each["baseline"], each["system"]) == (baseline, system):
            compared: Mapping[str, Any] = each
            return compared
    return {}


def _bounds(estimate: Estimate) -> tuple[str, str]:
    """Write both ends of an interval; one speaker alone bounds nothing."""
    low, high = estimate["low"], estimate["high"]
    return (
        "\N{MINUS SIGN}\N{INFINITY}" if low is None else number(low),
        "\N{INFINITY}" if high is None else number(high),
    )


def _probability(value: float) -> str:
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}" if value < 0.01 else f"{value:.2f}"
