"""Show the share of an oracle's gain that the models recover: beside WER, with intervals."""

from collections.abc import Mapping
from typing import Any

from jobs.report_page.blocks import Cell, Paragraph, Row, Table, grouped_table, number, printable
from jobs.report_page.certainty import POOLED, Estimate, bounds
from jobs.report_page.scores import Report, in_order
from pipeline.runs.names import BASELINE, ORACLE, STUDENT, sequence_trained

NONE = "none"
"""The recovery where the oracle gains nothing on the baseline."""

UNKNOWN_LANGUAGE_MODEL = (
    " The two runs are not known to decode with the same language model. Where they do not, "
    "recovery speaks of the language models, too: give the oracle this run's by evaluation.arpa."
)


def recovery_statement(report: Report) -> str:
    """State the student's recovery over all words, before and after sMBR; "" without an oracle."""
    found = _oracle(report)
    if not found:
        return ""
    said = f"Over all words {_stated(found, STUDENT)}"
    if (after := sequence_trained(STUDENT)) in found["pooled"]["recovery"]:
        said += f" After sMBR: over all words {_stated(found, after)}"
    return said


def _stated(found: Mapping[str, Any], model: str) -> str:
    recovery: Estimate | None = found["pooled"]["recovery"][model]
    if recovery is None:
        return "the oracle gains nothing on the baseline: none of it is recovered."
    low, high = bounds(recovery)
    return (
        f"the student recovers {number(recovery['value'])} % of what the oracle gains on the "
        f"baseline, with a {found['level']} % interval from {low} to {high} %."
    )


def recovery_note(report: Report) -> Paragraph | None:
    """Say which model is the oracle, what was transcribed for it, and what the two runs share."""
    found = _oracle(report)
    if not found:
        return None
    here, there = (found["labelled_hours"][run] or 0.0 for run in ("this", "oracle"))
    text = (
        f"The oracle is the baseline of {found['run']}. It learnt from {number(there, 2)} h of "
        f"transcribed speech, this run's from {number(here, 2)} h. Recovery is the share of the "
        "oracle's gain on the baseline that a model has; after sMBR all three have it."
    )
    if there <= here:
        text += " It learnt from no more than this run's, so it is no oracle of this run."
    if found["lacks"]:
        text += f" The oracle has no {found['lacks']}, so nothing is recovered after sMBR."
    text += "" if found["has_same_language_model"] else UNKNOWN_LANGUAGE_MODEL
    return Paragraph(text, "note")


def recovery_table(report: Report) -> Table | None:
    """Tabulate each model's word error rate and its recovery, with intervals, by placement."""
    groups: dict[str, list[Row]] = {
        name: [_row(found, model) for model in _shown(found)]
        for name, found in _scopes(report).items()
    }
    if not groups:
        return None
    header = ["Placement", "Model", "WER", "interval", "recovery", "interval"]
    oracle = _oracle(report)
    caption = (
        f"Word error rates and recovery, the share of the oracle's gain, %, with {oracle['level']} "
        f"% intervals of {oracle['num_resamples']:,} draws of speakers"
    )
    return grouped_table(caption, header, groups)


def _row(found: Mapping[str, Any], model: str) -> Row:
    rate: Estimate = found["wer"][model]
    row = [model, number(rate["value"]), " to ".join(bounds(rate))]
    if model not in found["recovery"]:
        return [*row, "", ""]
    recovery: Estimate | None = found["recovery"][model]
    if recovery is None:
        return [*row, NONE, ""]
    return [*row, Cell(number(recovery["value"]), "strong"), " to ".join(bounds(recovery))]


def _shown(found: Mapping[str, Any]) -> list[str]:
    """Order the models: those before sMBR, from the baseline to the oracle, then those after it."""
    before, after = _recovering(found)
    shown = [BASELINE, *before, ORACLE]
    if after:
        shown += [sequence_trained(BASELINE), *after, sequence_trained(ORACLE)]
    return shown


def _recovering(found: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the models of which a share is stated, before sMBR and after it."""
    names: Mapping[str, Any] = found["recovery"]
    after = set(map(sequence_trained, names))
    before = in_order(name for name in names if name not in after)
    return before, [name for name in map(sequence_trained, before) if name in names]


def oracle_rates(report: Report) -> dict[str, dict[str, float]]:
    """Return the oracle's word error rates by placement, before and after sMBR."""
    at: Mapping[str, Any] = _oracle(report).get("by_placement") or {}
    rates: dict[str, dict[str, float]] = {}
    for name, found in at.items():
        for model in _shown(found):
            if model in (ORACLE, sequence_trained(ORACLE)):
                rates.setdefault(model, {})[name] = found["wer"][model]["value"]
    return rates


def recovery_columns(report: Report) -> tuple[list[str], list[list[str]]]:
    """Return the placements under a heading, and a column a model, for the terminal."""
    scopes = _scopes(report)
    if not scopes:
        return [], []
    before, after = _recovering(next(iter(scopes.values())))
    columns = [
        [printable(model), *(_share(found["recovery"][model]) for found in scopes.values())]
        for model in (*before, *after)
    ]
    return ["recovery, %", *map(printable, scopes)], columns


def _share(recovery: Estimate | None) -> str:
    if recovery is None:
        return NONE
    return f"{number(recovery['value'])} ({' to '.join(bounds(recovery))})"


def _scopes(report: Report) -> dict[str, Mapping[str, Any]]:
    """Return what is recovered by placement, and over all words where there are several."""
    found = _oracle(report)
    if not found:
        return {}
    at = dict(found["by_placement"])
    if len(at) != 1:
        at[POOLED] = found["pooled"]
    return at


def _oracle(report: Report) -> Mapping[str, Any]:
    found: Mapping[str, Any] = report.get("oracle") or {}
    return found
