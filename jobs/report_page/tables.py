"""Order and summarize word error rates, and make the plain tables of the page.

The other tables are of frame accuracy, hours, utterances, quarantine and faults of devices.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

from jobs.report_page.blocks import Cell, Row, Table, grouped_table, number, table
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


ERRORS = ("substitutions", "insertions", "deletions")


def word_error_table(report: Report) -> Table | None:
    """Tabulate word error rates by placement, the student's WERR, and the paper's if known."""
    wer: Scores = report.get("wer") or {}
    found = reductions(report)
    models, names = in_order(wer), placements(wer)
    paper = [PAPER_WERR] if at_paper_placements(wer) else []
    rows: list[Row] = [
        [
            name,
            *_lowest_marked([wer[model].get(name) for model in models]),
            *(_reduction(werr.get(name)) for werr in found.values()),
            *(number(werr[name]) for werr in paper),
        ]
        for name in names
    ]
    means = [number(mean(wer[model])) for model in models]
    papers_mean = (number(mean(werr)) for werr in paper)
    foot: Row = [
        "mean",
        *means,
        *(_reduction(mean(werr)) for werr in found.values()),
        *papers_mean,
    ]
    header = ["Placement", *models, *found, *("paper WERR" for _ in paper)]
    caption = "Word error rates and the WERR of the student, %"
    return table(caption, header, rows, foot if len(names) > 1 else None)


def _lowest_marked(rates: Sequence[float | None]) -> list[Cell]:
    lowest = min((rate for rate in rates if rate is not None), default=None)
    return [
        Cell(number(rate), "best" if rate is not None and rate == lowest else "") for rate in rates
    ]


def _reduction(value: float | None) -> Cell:
    return Cell(number(value), "worse" if value is not None and value < 0 else "strong")


def error_table(report: Report) -> Table | None:
    """Tabulate substitutions, insertions and deletions of each model at each placement."""
    counts = report.get("word_errors") or {}
    groups: dict[str, list[Row]] = {}
    for name in placements(counts):
        for model in in_order(counts):
            if (errors := counts[model].get(name)) is not None:
                numbers = [errors[kind] for kind in ERRORS]
                cells = [number(value, 0) for value in (*numbers, sum(numbers))]
                row = [model, *cells, number(errors["reference_words"], 0)]
                groups.setdefault(name, []).append(row)
    header = ["Placement", "Model", *ERRORS, "errors", "reference words"]
    return grouped_table("Counts against the reference transcripts", header, groups)


def decoding_table(report: Report) -> Table | None:
    """Tabulate the settings that the development speakers chose for each model."""
    chosen = report.get("decoding") or {}
    settings = list(dict.fromkeys(name for each in chosen.values() for name in each))
    rates = development_rates(report)
    rows = [
        [
            model,
            *(f"{chosen[model][name]:g}" for name in settings),
            *([number(rates.get(model))] if rates else []),
        ]
        for model in in_order(chosen)
    ]
    caption = "Chosen by the word errors of the development speakers"
    header = ["Model", *(name.replace("_", " ") for name in settings)]
    if rates:
        caption += ", whose rates with these settings are the last column, %"
        header.append("development WER")
    return table(caption, header, rows)


def decoding_note(report: Report) -> str:
    """Say what the development speakers' rates are for; "" without them."""
    if not development_rates(report):
        return ""
    return (
        "Choose between recipes by the development WER, which --compare shows for two runs: no "
        "held-out speaker then has a part in the choice."
    )


def frame_accuracy_table(report: Report) -> Table | None:
    """Tabulate frame accuracy by placement and model."""
    accuracy: Scores = report.get("frame_accuracy") or {}
    models = in_order(accuracy)
    rows = [
        [name, *(number(accuracy[model].get(name)) for model in models)]
        for name in placements(accuracy)
    ]
    return table(
        "Low-rate frames whose best senone is the aligned one, %", ["Placement", *models], rows
    )


def hours_table(report: Report) -> Table | None:
    """Tabulate the hours of speech of each subset."""
    hours: Mapping[str, float] = report.get("hours") or {}
    rows = [[subset, number(value, 2)] for subset, value in hours.items()]
    return table("Hours of speech extracted, by subset", ["Subset", "hours"], rows)


def funnel_table(report: Report) -> Table | None:
    """Tabulate the utterances into each step, out of it, not selected, and quarantined."""
    rows = []
    for name, step in (report.get("steps") or {}).items():
        num_in, num_out, lost = (
            step[key] for key in ("utterances_in", "utterances_out", "quarantined")
        )
        # Utterances neither written nor quarantined were not selected: manifests balance.
        counts = [number(count, 0) for count in (num_in, num_in - num_out - lost, lost, num_out)]
        rows.append([name, *counts, number(step["seconds"])])
    header = ["Step", "in", "not selected", "quarantined", "out", "seconds"]
    return table("Utterances through each step", header, rows)


def quarantine_table(report: Report) -> Table | None:
    """Tabulate the reasons of quarantine, most frequent first."""
    quarantine: Mapping[str, Mapping[str, int]] = report.get("quarantine") or {}
    groups = {
        step: [[reason, number(count, 0)] for reason, count in Counter(reasons).most_common()]
        for step, reasons in quarantine.items()
    }
    return grouped_table("Utterances quarantined, by reason", ["Step", "Reason", "count"], groups)


def device_fault_table(report: Report) -> Table | None:
    """Tabulate the devices that tasks left out, or that failed them, and the first reason."""
    faults: Mapping[str, Sequence[Mapping[str, Any]]] = report.get("device_faults") or {}
    columns = ("device", "host", "kind", "num_tasks", "reason")
    groups = {
        step: [[str(each[name]) for name in columns] for each in some]
        for step, some in faults.items()
    }
    header = ["Step", "Device", "Host", "Fault", "tasks", "First reason"]
    return grouped_table("Devices that failed, by the tasks that met it", header, groups)
