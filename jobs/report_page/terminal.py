"""Format word error rates, and planned beside actual cost, as plain text for the terminal."""

import textwrap
from collections.abc import Iterator, Sequence

from jobs.report_page.blocks import printable
from jobs.report_page.certainty import certainty
from jobs.report_page.other_runs.comparison import development_columns
from jobs.report_page.other_runs.recovery import (
    oracle_rates,
    recovery_columns,
    recovery_statement,
)
from jobs.report_page.planned import plan_columns
from jobs.report_page.scores import (
    Report,
    Scores,
    development_rates,
    headline,
    in_order,
    mean,
    placements,
    reductions,
)

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
