"""Render the report: as a page of HTML, and its first tables as text for the terminal.

Word error rates come first, then curves, data, targets, shuffle and steps.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from jobs.report_page.blocks import (
    Block,
    Command,
    Drawing,
    Figure,
    Paragraph,
    Preformatted,
    Section,
    number,
    paragraph,
    printable,
    section,
)
from jobs.report_page.certainty import (
    certainty,
    interval_table,
    speaker_figure,
    speaker_table,
    worst_utterances,
)
from jobs.report_page.figures import (
    block_ends,
    hours_of,
    learning_curve,
    pace_curve,
    step_bars,
    trainer_curve,
    word_error_bars,
)
from jobs.report_page.hours_and_costs import (
    key_figures,
    origin_facts,
    plan_columns,
    plan_note,
    plan_table,
    step_table,
    waterfall_figure,
    waterfall_table,
)
from jobs.report_page.other_runs import (
    amounts_table,
    comparison_note,
    curve_drawing,
    curve_table,
    development_columns,
    development_table,
    oracle_rates,
    pairs_table,
    rates_table,
    recovery_columns,
    recovery_note,
    recovery_statement,
    recovery_table,
    settings_table,
)
from jobs.report_page.tables import (
    Report,
    Scores,
    at_paper_placements,
    decoding_note,
    decoding_table,
    development_rates,
    device_fault_table,
    error_table,
    frame_accuracy_table,
    funnel_table,
    headline,
    hours_table,
    in_order,
    mean,
    placements,
    quarantine_table,
    reductions,
    word_error_table,
)
from jobs.report_page.targets_and_shuffle import (
    costs_drawing,
    costs_note,
    costs_table,
    costs_warning,
    shuffle_note,
    shuffle_table,
    shuffle_verdict,
)
from pipeline.runs.names import INGEST_STEP, section_of

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""The browser's own guard: unescaped markup could load and run nothing."""

PAPER_NOTE = (
    " The WERR of the paper (Table II of Realizing Petabyte Scale Acoustic Modeling) is for other "
    "data, and a million hours of it."
)

INGEST_REMEDY = (
    f"The ledgers below {INGEST_STEP}/ say of each utterance why it was refused at {INGEST_STEP}. "
    "Correct what they name, and ingest it in another run, or in an increment of this one."
)


def render_report(report: Report) -> str:
    """Render a self-contained HTML page, also well-formed XML; the same report gives the same text.

    Empty and missing parts of the report are left out; all its texts are escaped.
    """
    files = resources.files("jobs.report_page")
    environment = Environment(
        autoescape=True, finalize=_printable, undefined=StrictUndefined, keep_trailing_newline=True
    )
    layout = environment.from_string(files.joinpath("layout.html").read_text("utf-8"))
    # The style is ours; an escaped one would have no > and no quotes.
    style = Markup(files.joinpath("style.css").read_text("utf-8"))  # noqa: S704
    return layout.render(
        name=str(report["run"]).rstrip("/").rpartition("/")[2],
        policy=POLICY,
        style=style,
        headline=headline(report),
        top=[each for each in (key_figures(report), origin_facts(report)) if each],
        sections=list(_sections(report)),
    )


def _printable(value: object) -> object:
    """Make a value of the template printable; what is markup already has no text of others."""
    return value if isinstance(value, Markup) else printable(str(value))


def _sections(report: Report) -> Iterator[Section]:
    recipe = json.dumps(report.get("recipe") or {}, indent=2, ensure_ascii=False)
    found = (
        section("Word error rates", word_error_table(report), _word_error_figure(report)),
        section("Certainty", paragraph(certainty(report)), interval_table(report)),
        section(
            "Recovery",
            paragraph(recovery_statement(report)),
            recovery_table(report),
            recovery_note(report),
        ),
        _comparison(report),
        section("Hours of unlabelled speech", curve_table(report), _hours_figure(report)),
        section("Kinds of errors", error_table(report), worst_utterances(report)),
        section("Speakers", speaker_figure(report), speaker_table(report)),
        section(
            "Decoding settings",
            decoding_table(report),
            paragraph(decoding_note(report), "note"),
        ),
        section("Frame accuracy", frame_accuracy_table(report)),
        section("Learning curves", *_curves(report)),
        section("Data", waterfall_figure(report), waterfall_table(report) or hours_table(report)),
        section("Quarantine", *_quarantine(report), device_fault_table(report)),
        section("Targets", _targets(report)),
        section("Retained mass by k", *_kbest_costs(report)),
        section(
            "Shuffle",
            paragraph(shuffle_verdict(report), "verdict"),
            shuffle_table(report),
            paragraph(shuffle_note(report), "note"),
        ),
        section("Steps", _step_figure(report), funnel_table(report), step_table(report)),
        section("Planned and actual", plan_table(report), paragraph(plan_note(report), "note")),
        section("Recipe", Preformatted("The resolved recipe", recipe)),
    )
    return (each for each in found if each is not None)


def _figure(drawing: Drawing | None, caption: str) -> Figure | None:
    return Figure(drawing, caption) if drawing else None


def _word_error_figure(report: Report) -> Figure | None:
    wer = report.get("wer") or {}
    if not any(wer.values()):
        return None
    note = (
        "Lower is better; the lowest rate of a row is set bold. WERR is the share of the word "
        "error rate of the baseline that the student removes."
    )
    if report.get("werr_smbr"):
        note += " After sMBR it compares both models as sequence training left them."
    return _figure(word_error_bars(wer), note + (PAPER_NOTE if at_paper_placements(wer) else ""))


def _comparison(report: Report) -> Section | None:
    return section(
        "Comparison",
        comparison_note(report),
        development_table(report),
        pairs_table(report),
        rates_table(report),
        amounts_table(report),
        settings_table(report),
    )


def _hours_figure(report: Report) -> Figure | None:
    note = "Bars are intervals over speakers. The baseline hears no unlabelled speech."
    return _figure(curve_drawing(report), note)


def _curves(report: Report) -> Iterator[Block | None]:
    curves = report.get("curves") or {}
    for index, name in enumerate(in_order(curves)):
        curve = curves[name]
        if not curve:
            continue
        yield Paragraph(name, "model")
        frames = frames_in_block(report, name, curve)
        yield _figure(
            learning_curve(name, index, curve, frames), _curve_caption(report, name, frames)
        )
        if pace := (report.get("pace") or {}).get(name):
            yield _figure(pace_curve(name, index, pace), "Sub-epochs that the last start trained")
        yield _figure(trainer_curve(name, index, curve), _trainer_caption(curve))


def frames_in_block(report: Report, name: str, curve: Sequence[Mapping[str, Any]]) -> int:
    """Return about how many frames all ranks read in a block; 0 for a trainer without blocks."""
    trained = "sequence_training" if name.endswith("_smbr") else section_of(name)
    settings = (report.get("recipe") or {}).get(trained) or {}
    block_size = (settings.get("trainer") or {}).get("block_size", 0)
    ranks: int = curve[-1].get("num_ranks", 1)
    return int(block_size * settings.get("minibatch_frames", 0) * ranks)


def _trainer_caption(curve: Sequence[Mapping[str, Any]]) -> str:
    num_bytes = sum(point.get("trainer", {}).get("bytes_sent", 0) for point in curve)
    sent = f"{num_bytes / 1e6:,.1f} MB of gradients and models were sent, by all ranks together"
    if "residual_norm" not in curve[-1].get("trainer", {}):
        return sent
    return (
        f"{sent}. A residual that keeps growing means a gradient threshold too small where many "
        "gradients are sent, and too large where few are"
    )


def _curve_caption(report: Report, name: str, frames: int) -> str:
    curve = report["curves"][name]
    size = (report.get("models") or {}).get(name)
    parameters = f"{number(size['num_parameters'], 0)} parameters, " if size else ""
    seen = sum(point["num_frames"] for point in curve)
    rates = [point["learning_rate"] for point in curve]
    caption = (
        f"{parameters}{len(curve)} sub-epochs, {seen:,} frames, {hours_of(seen):,.2f} h, "
        f"learning rates {max(rates):.2g} to {min(rates):.2g}"
    )
    if frames:
        drawn = "ticks on the axis" if block_ends(curve, frames) else "too many to draw"
        caption += f"; a block ends about every {hours_of(frames):.2g} h ({drawn})"
    return caption


def _quarantine(report: Report) -> Iterator[Block | None]:
    """Yield the reasons, and the commands that read what may be back again."""
    yield quarantine_table(report)
    reasons: Mapping[str, Mapping[str, int]] = report.get("quarantine") or {}
    if reasons and not any(reasons.values()):
        yield Paragraph("No utterance was quarantined: 0 lost.")
    if reasons.get(INGEST_STEP):
        yield Paragraph(INGEST_REMEDY)
    for each in report.get("retries") or ():
        purpose = f"Once the cause is gone, this reads {', '.join(each['reasons'])} again:"
        yield Command(purpose, each["command"])


def _targets(report: Report) -> Paragraph | None:
    targets = report.get("targets") or {}
    if not targets:
        return None
    num_teachers, is_at_all = targets.get("num_teachers", 1), targets.get("offsets") == "all"
    source, whose = ("the teacher", "its")
    if num_teachers > 1:
        source, whose = f"the mean posteriors of {num_teachers} teachers", "their"
    where = " at all three offsets, of which each pass reads the next" if is_at_all else ""
    return Paragraph(
        f"The student learns from the k = {targets['k']} highest logits of {source} in each "
        f"frame. They hold {100 * targets['mean_retained_mass']:.2f} % of {whose} probability on "
        f"average, over {targets['num_frames']:,} low-rate frames{where}."
    )


def _kbest_costs(report: Report) -> Iterator[Block | None]:
    yield paragraph(costs_warning(report), "warning")
    yield _figure(costs_drawing(report), "All placements together")
    yield costs_table(report)
    yield paragraph(costs_note(report), "note")


def _step_figure(report: Report) -> Figure | None:
    steps: Mapping[str, Mapping[str, float]] = report.get("steps") or {}
    if not steps:
        return None
    seconds = {name: step["seconds"] for name, step in steps.items()}
    total = sum(seconds.values())
    return _figure(step_bars(seconds), f"Wall-clock time, {total:,.1f} s together")


LINE_WIDTH = 70


def format_table(report: Report) -> str:
    """Format headline, word error rates, WERR, recovery and plan in lines of some 70 columns."""
    wer: Scores = report.get("wer") or {}
    models, names = in_order(wer), placements(wer)
    stated = (headline(report), certainty(report), recovery_statement(report))
    blocks = [textwrap.fill(printable(text), LINE_WIDTH) for text in stated if text]
    rows = [(model, wer[model]) for model in models]
    rows += [*oracle_rates(report).items(), *reductions(report).items()]
    labels = [printable(label) for label in ("WER, %", *(label for label, _ in rows))]
    columns = [_column(printable(name), [values.get(name) for _, values in rows]) for name in names]
    if len(names) > 1:
        columns.append(_column("mean", [mean(values) for _, values in rows]))
    if development := development_rates(report):
        columns.append(_column("dev", [development.get(label) for label, _ in rows]))
    stub = _left(labels)
    blocks += _folded(stub, columns)
    for names, texts in (
        recovery_columns(report),
        development_columns(report),
        plan_columns(report),
    ):
        blocks += _folded(_left(names), [_right(cells) for cells in texts])
    return "\n\n".join(blocks)


def _folded(stub: Sequence[str], columns: Sequence[list[str]]) -> Iterator[str]:
    for some in _fitting(columns, stub):
        yield "\n".join("".join(line) for line in zip(stub, *some, strict=True))


def _left(labels: Sequence[str]) -> list[str]:
    width = max(map(len, labels), default=0)
    return [label.ljust(width) for label in labels]


def _right(cells: Sequence[str]) -> list[str]:
    width = max(map(len, cells)) + 2
    return [cell.rjust(width) for cell in cells]


def _column(name: str, values: Sequence[float | None]) -> list[str]:
    cells = [name, *("-" if value is None else f"{value:.1f}" for value in values)]
    width = max(map(len, cells)) + 2
    return [cell.rjust(max(width, 7)) for cell in cells]


def _fitting(columns: Sequence[list[str]], stub: Sequence[str]) -> Iterator[list[list[str]]]:
    some: list[list[str]] = []
    for column in columns:
        if some and sum(len(each[0]) for each in (stub, *some, column)) > LINE_WIDTH:
            yield some
            some = []
        some.append(column)
    if some:
        yield some
