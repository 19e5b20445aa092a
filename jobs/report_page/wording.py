"""Numbers, orders and sentences that the report's page and its text for the terminal share."""

from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

from pipeline.runs.names import BASELINE, EVALUATED_MODELS, ORACLE, STUDENT, sequence_trained

Report = Mapping[str, Any]
"""What report.json holds."""

Scores = Mapping[str, Mapping[str, float]]
"""A value in percent by model and placement."""

Estimate = Mapping[str, float | None]
"""A `value` in percent and the ends of its interval, `low` and `high`; None is unbounded."""

PARTS = (
    *("certificate", "comparison", "confidence", "curves", "decoding", "development"),
    *("device_faults", "extends", "frame_accuracy", "hours", "hours_curve", "kbest_costs"),
    *("labelled_from", "models", "oracle", "origin", "out_of_vocabulary", "pace", "plan"),
    *("quarantine", "recipe", "retries", "speakers", "statistics", "steps"),
    *("targets", "waterfall", "wer", "werr", "werr_smbr", "word_errors", "worst"),
)
"""The parts of a report that are shown, beside the run and the version."""


def with_all_parts(report: Report) -> Report:
    """Return the report with an empty table for each part that is missing or null."""
    return {**report, **{name: report.get(name) or {} for name in PARTS}}


def printable(text: str) -> str:
    """Replace unprintable characters, such as terminal codes and lone surrogates, by U+FFFD."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def number(value: float | None, digits: int = 1) -> str:
    """Format a number with a true minus sign; None is a dash."""
    if value is None:
        return "\N{EN DASH}"
    return f"{value:,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def interval(estimate: Estimate) -> str:
    """Write both ends of an interval; one speaker alone bounds nothing."""
    low, high = estimate["low"], estimate["high"]
    lower = "\N{MINUS SIGN}\N{INFINITY}" if low is None else number(low)
    upper = "\N{INFINITY}" if high is None else number(high)
    return f"{lower} to {upper}"


def probability(value: float) -> str:
    """Write a p-value; of one below 0.0001 only that."""
    return "< 0.0001" if value < 1e-4 else f"{value:.4f}" if value < 0.01 else f"{value:.2f}"


def mean(scores: Mapping[str, float]) -> float | None:
    """Return the mean over placements; None if there are none."""
    return fmean(scores.values()) if scores else None


def in_order(models: Iterable[str]) -> list[str]:
    """Order models: baseline, teacher, student; then any others as given."""
    names = list(models)
    known = [name for name in EVALUATED_MODELS if name in names]
    return known + [name for name in names if name not in EVALUATED_MODELS]


def by_placement(scores: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Turn values by model and placement into values by placement and model, both in order."""
    found: dict[str, dict[str, Any]] = {}
    for model in in_order(scores):
        for placement, value in scores[model].items():
            found.setdefault(placement, {})[model] = value
    return found


def reductions(report: Report) -> dict[str, Mapping[str, float]]:
    """Return the student's WERR by placement, before and, where both models had it, after sMBR."""
    named = {"WERR": report["werr"], "WERR after sMBR": report["werr_smbr"]}
    return {name: each for name, each in named.items() if each}


def development_rates(report: Report) -> dict[str, float]:
    """Return each model's word error rate on the development speakers, as it was tuned."""
    found: Mapping[str, Mapping[str, float]] = report["development"]
    return {model: found[model]["wer"] for model in in_order(found)}


def headline(report: Report) -> str:
    """State in one sentence the mean WERR, and whether the student is better at every placement."""
    reductions: Mapping[str, float] = report["werr"]
    if not reductions and report["wer"] and STUDENT not in report["wer"]:
        return (
            "This run has no unlabelled speech, and so no targets and no student: its models "
            "learnt from labelled speech alone."
        )
    wer = report["wer"]
    # Of no error nothing can be lowered.
    perfect = [each for each in wer.get(BASELINE, {}) if each not in reductions]
    if not reductions and perfect:
        return "The baseline makes no error: there is nothing for the student to lower."
    if not reductions:
        return "This run has no word error rates yet: it has not been evaluated."
    overall = fmean(reductions.values())
    verb = "lowers" if overall >= 0 else "raises"
    change = f"the word error rate of the supervised baseline by {abs(overall):.1f} %"
    if len(reductions) == 1 and not perfect:
        return f"The student {verb} {change} (WERR)."
    placements = f"{len(reductions)} placement{'s' if len(reductions) > 1 else ''}"
    start = f"Over {placements} the student {verb} {change} on average (mean WERR)"
    lost = [name for name, reduction in reductions.items() if not reduction > 0]
    lost += [name for name in perfect if wer[STUDENT][name] > 0]
    *losses, last = lost or [""]
    if not last:
        return f"{start}; it beats the baseline at every placement."
    named = f"{', '.join(losses)} and {last}" if losses else last
    return f"{start}; it does not beat the baseline at {named}."


def gain_on_baseline(found: Mapping[str, Any], model: str) -> Mapping[str, Any]:
    """Return the comparison of a model with the baseline, at a placement or over all; or {}."""
    pair = BASELINE, model
    same = (each for each in found["comparisons"] if (each["baseline"], each["system"]) == pair)
    return next(same, {})


def certainty(report: Report) -> str:
    """State the student's WERR over all words with its interval and test; "" without one."""
    statistics = report["statistics"]
    found = gain_on_baseline(statistics["pooled"], STUDENT) if statistics else {}
    if not found:
        return ""
    pooled, reduction = statistics["pooled"], found["reduction"]
    return (
        f"Over {pooled['num_speakers']:,} speakers and {pooled['reference_words']:,} words "
        f"together the WERR is {number(reduction['value'])} %, with a {statistics['level']} % "
        f"interval from {interval(reduction)} %. If both models were equally good, a difference "
        f"as large would come about with probability {probability(found['p_value'])}."
    )


def unknown_words(report: Report) -> str:
    """State how many words the lexicon lacks, and the least share of errors that they make."""
    counts: Mapping[str, int] = report["out_of_vocabulary"]
    if not counts:
        return ""
    unknown, words = counts["num_unknown"], counts["num_words"]
    said = (
        f"Of {words:,} held-out words {unknown:,} ({number(100 * unknown / words)} %) are in no "
        f"hypothesis, as the lexicon or the language model lacks them: "
        f"{counts['num_unknown_types']:,} of {counts['num_types']:,} different words."
    )
    shares = []
    for model in in_order(report["word_errors"]) if unknown else []:
        of_placements = report["word_errors"][model].values()
        kinds = ("substitutions", "insertions", "deletions")
        errors = sum(counts[kind] for counts in of_placements for kind in kinds)
        shares.append(f"{number(100 * unknown / errors)} % of the errors of {model}")
    return f"{said} They make at least {', '.join(shares)}." if shares else said


def scopes(found: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return statistics by placement, and over all words where there is not just one placement."""
    at = dict(found.get("by_placement") or {})
    return at if len(at) == 1 or not found else {**at, "all together": found["pooled"]}


def recovering(found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the models that may recover the oracle's gain, before sMBR and after it."""
    names: Mapping[str, Any] = found["recovery"]
    after = set(map(sequence_trained, names))
    before = in_order(name for name in names if name not in after)
    return before, [name for name in map(sequence_trained, before) if name in names]


def models_and_oracle(found: Mapping[str, Any]) -> list[str]:
    """Order models from the baseline to the oracle: those before sMBR, then those after it."""
    before, after = recovering(found)
    trained_on = [sequence_trained(BASELINE), *after, sequence_trained(ORACLE)] if after else []
    return [BASELINE, *before, ORACLE, *trained_on]


def recovery_statement(report: Report) -> str:
    """State the student's recovery over all words, before and after sMBR; "" without the two."""
    oracle = report["oracle"]
    recovery = oracle["pooled"]["recovery"] if oracle else {}
    if STUDENT not in recovery:
        return ""
    said = f"Over all words {_recovered(recovery[STUDENT], oracle['level'])}"
    if (after := sequence_trained(STUDENT)) in recovery:
        said += f" After sMBR: over all words {_recovered(recovery[after], oracle['level'])}"
    return said


def _recovered(recovery: Estimate | None, level: int) -> str:
    if recovery is None:
        return "the oracle gains nothing on the baseline: none of it is recovered."
    return (
        f"the student recovers {number(recovery['value'])} % of what the oracle gains on the "
        f"baseline, with a {level} % interval from {interval(recovery)} %."
    )
