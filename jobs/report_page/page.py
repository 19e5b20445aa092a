"""Render the page: word error rates first, then curves, data, targets, shuffle and steps."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from jobs.report_page.certainty import (
    certainty,
    interval_table,
    speaker_table,
    worst_utterances,
)
from jobs.report_page.hours_curve import curve_figure, curve_table
from jobs.report_page.kbest_costs import costs_figure, costs_note, costs_table, costs_warning
from jobs.report_page.markup import details, figure, number, paragraph, section, text
from jobs.report_page.planned import plan_note, plan_table
from jobs.report_page.plots import learning_curve, step_bars, trainer_curve, word_error_bars
from jobs.report_page.scores import Report, at_paper_placements, headline, in_order
from jobs.report_page.shuffled import shuffle_note, shuffle_table
from jobs.report_page.tables import (
    decoding_table,
    device_fault_table,
    error_table,
    frame_accuracy_table,
    funnel_table,
    hours_table,
    quarantine_table,
    word_error_table,
)

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The browser's own guard: unescaped markup could load and run nothing."""

PAPER_NOTE = (
    " The WERR of the paper (Table II of Realizing Petabyte Scale Acoustic Modeling) is for other "
    "data, and a million hours of it."
)


def render_report(report: Report) -> str:
    """Render a self-contained HTML page, also well-formed XML; the same report gives the same text.

    Empty and missing parts of the report are left out; all its texts are escaped.
    """
    name = str(report["run"]).rstrip("/").rpartition("/")[2]
    style = resources.files("jobs.report_page").joinpath("page.css").read_text("utf-8")
    body = "\n".join(part for part in (_top(report, name), *_sections(report)) if part)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="{POLICY}"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{text(name)} \N{EN DASH} megahour report</title>
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _top(report: Report, name: str) -> str:
    origin = f"megahour {report['code_version']} · {report['run']}"
    return (
        f"<header>\n<h1>{text(name)}</h1>\n{paragraph(headline(report), 'headline')}\n"
        f"{paragraph(origin, 'origin')}\n</header>"
    )


def _sections(report: Report) -> list[str]:
    recipe = json.dumps(report.get("recipe") or {}, indent=2, ensure_ascii=False)
    return [
        section("Word error rates", word_error_table(report), _word_error_note(report)),
        section("Certainty", _certainty(report), interval_table(report)),
        section("Hours of unlabelled speech", curve_table(report), _hours_curve(report)),
        section("Kinds of errors", error_table(report), worst_utterances(report)),
        section("Speakers", speaker_table(report)),
        section("Decoding settings", decoding_table(report)),
        section("Frame accuracy", frame_accuracy_table(report)),
        section("Learning curves", *_curves(report)),
        section("Data", hours_table(report), quarantine_table(report), device_fault_table(report)),
        section("Targets", _targets(report)),
        section("What k costs", *_kbest_costs(report)),
        section("Shuffle", shuffle_table(report), _shuffle_note(report)),
        section("Steps", _step_figure(report), funnel_table(report)),
        section("Planned and actual", plan_table(report), _plan_note(report)),
        section("Recipe", details("The resolved recipe", recipe)),
    ]


def _word_error_note(report: Report) -> str:
    wer = report.get("wer") or {}
    if not any(wer.values()):
        return ""
    note = (
        "Lower is better; the lowest rate of a row is set bold. WERR is the share of the word "
        "error rate of the baseline that the student removes."
    )
    if report.get("werr_smbr"):
        note += " After sMBR it compares both models as sequence training left them."
    return figure(word_error_bars(wer), note + (PAPER_NOTE if at_paper_placements(wer) else ""))


def _hours_curve(report: Report) -> str:
    drawn = curve_figure(report)
    note = "Bars are intervals over speakers. The baseline hears no unlabelled speech."
    return figure(drawn, note) if drawn else ""


def _curves(report: Report) -> list[str]:
    curves = report.get("curves") or {}
    figures = []
    for index, name in enumerate(in_order(curves)):
        if curves[name]:
            drawn = learning_curve(name, index, curves[name])
            figures.append(figure(drawn, _curve_caption(report, name)))
            if exchanged := trainer_curve(name, index, curves[name]):
                figures.append(figure(exchanged, _trainer_caption(curves[name])))
    return figures


def _trainer_caption(curve: Sequence[Mapping[str, Any]]) -> str:
    num_bytes = sum(point["trainer"]["bytes_sent"] for point in curve)
    sent = f"{num_bytes / 1e6:,.1f} MB of gradients and models were sent, by all ranks together"
    if "residual_norm" not in curve[-1]["trainer"]:
        return sent
    return (
        f"{sent}. A residual that keeps growing means a gradient threshold too small where many "
        "gradients are sent, and too large where few are"
    )


def _curve_caption(report: Report, name: str) -> str:
    curve = report["curves"][name]
    size = (report.get("models") or {}).get(name)
    parameters = f"{number(size['num_parameters'], 0)} parameters, " if size else ""
    frames = sum(point["num_frames"] for point in curve)
    rates = [point["learning_rate"] for point in curve]
    return (
        f"{parameters}{len(curve)} sub-epochs, {frames:,} frames, "
        f"learning rates {max(rates):.2g} to {min(rates):.2g}"
    )


def _targets(report: Report) -> str:
    targets = report.get("targets") or {}
    if not targets:
        return ""
    number, is_at_all = targets.get("num_teachers", 1), targets.get("offsets") == "all"
    source, whose = ("the teacher", "its")
    if number > 1:
        source, whose = f"the mean posteriors of {number} teachers", "their"
    where = " at all three offsets, of which each pass reads the next" if is_at_all else ""
    return paragraph(
        f"The student learns from the k = {targets['k']} highest logits of {source} in each "
        f"frame. They hold {100 * targets['mean_retained_mass']:.2f} % of {whose} probability on "
        f"average, over {targets['num_frames']:,} low-rate frames{where}."
    )


def _kbest_costs(report: Report) -> list[str]:
    drawn = costs_figure(report)
    sentences = (costs_warning(report), costs_note(report))
    shown = figure(drawn, "All placements together") if drawn else ""
    return [*(paragraph(each) for each in sentences if each), costs_table(report), shown]


def _certainty(report: Report) -> str:
    stated = certainty(report)
    return paragraph(stated) if stated else ""


def _plan_note(report: Report) -> str:
    note = plan_note(report)
    return paragraph(note) if note else ""


def _shuffle_note(report: Report) -> str:
    note = shuffle_note(report)
    return paragraph(note) if note else ""


def _step_figure(report: Report) -> str:
    steps: Mapping[str, Mapping[str, float]] = report.get("steps") or {}
    if not steps:
        return ""
    seconds = {name: step["seconds"] for name, step in steps.items()}
    total = sum(seconds.values())
    return figure(step_bars(seconds), f"Wall-clock time, {total:,.1f} s together")
