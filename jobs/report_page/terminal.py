"""Format the report's first tables as text for the terminal, in lines of some 70 columns."""

import textwrap
from collections.abc import Iterator, Mapping, Sequence

from jobs.report_page.wording import (
    Report,
    by_placement,
    certainty,
    development_rates,
    headline,
    in_order,
    interval,
    mean,
    models_and_oracle,
    number,
    printable,
    recovering,
    recovery_statement,
    reductions,
    scopes,
    with_all_parts,
)
from pipeline.runs.names import ORACLE, sequence_trained

LINE_WIDTH = 70

Rows = list[list[str]]
"""The cells of a table by row; the first row names the columns, the first column the rows."""


def format_table(report: Report) -> str:
    """Format headline, word error rates, WERR, recovery, development rates and plan."""
    report = with_all_parts(report)
    stated = (headline(report), certainty(report), recovery_statement(report))
    blocks = [textwrap.fill(printable(text), LINE_WIDTH) for text in stated if text]
    blocks += _folded(_word_error_rows(report), least_width=7)
    for rows in (_recovery_rows(report), _development_rows(report), _plan_rows(report)):
        blocks += _folded(rows)
    return "\n\n".join(blocks)


def _word_error_rows(report: Report) -> Rows:
    wer = report["wer"]
    placements = list(by_placement(wer))
    development = development_rates(report)
    has_mean = len(placements) > 1
    rates = {
        **{model: wer[model] for model in in_order(wer)},
        **_oracle_rates(report),
        **reductions(report),
    }
    heads = ["WER, %", *placements, *["mean"] * has_mean, *["dev"] * bool(development)]
    rows = [heads]
    for label, values in rates.items():
        shown = [values.get(name) for name in placements]
        shown += [mean(values)] * has_mean + [development.get(label)] * bool(development)
        rows.append([label, *("-" if each is None else f"{each:.1f}" for each in shown)])
    return rows


def _oracle_rates(report: Report) -> dict[str, dict[str, float]]:
    """Return the oracle's word error rates by placement, before and after sMBR."""
    rates: dict[str, dict[str, float]] = {}
    for placement, found in report["oracle"].get("by_placement", {}).items():
        for model in models_and_oracle(found):
            if model in (ORACLE, sequence_trained(ORACLE)):
                rates.setdefault(model, {})[placement] = found["wer"][model]["value"]
    return rates


def _recovery_rows(report: Report) -> Rows:
    at = scopes(report["oracle"])
    if not at:
        return []
    before, after = recovering(next(iter(at.values())))
    rows = [["recovery, %", *before, *after]]
    for scope, found in at.items():
        shares = (found["recovery"][model] for model in (*before, *after))
        rows.append(
            [scope, *(f"{number(s['value'])} ({interval(s)})" if s else "none" for s in shares)]
        )
    return rows


def _development_rows(report: Report) -> Rows:
    here = development_rates(report)
    there = development_rates(with_all_parts(report["comparison"]))
    rows = [[name, number(there[name]), number(here[name])] for name in here if name in there]
    return [["development WER, %", "other run", "this run"], *rows] if rows else []


PLANNED = ("objects", "bytes written", "requests", "seconds")
"""The planned quantities that the terminal shows."""


def _plan_rows(report: Report) -> Rows:
    steps = report["plan"].get("steps") or {}
    rows = [
        [step, *(_planned_and_actual(quantity, pairs.get(quantity)) for quantity in PLANNED)]
        for step, pairs in steps.items()
    ]
    return [["planned, actual", *PLANNED], *rows] if rows else []


def _planned_and_actual(quantity: str, pair: Mapping[str, float | None] | None) -> str:
    if pair is None:
        return ""
    return " ".join(_amount(quantity, pair[kind]) for kind in ("planned", "actual"))


def _amount(quantity: str, value: float | None) -> str:
    if value is None:
        return "-"
    if "bytes" in quantity:
        return f"{value / 1e6:,.1f}M" if value >= 1e6 else f"{value / 1e3:,.0f}k"
    return f"{value:,.0f}"


def _folded(rows: Sequence[Sequence[str]], least_width: int = 0) -> Iterator[str]:
    """Align the columns; yield blocks of as many as fit on a line, each below the rows' names."""
    if not rows:
        return
    names, *columns = zip(*([printable(cell) for cell in row] for row in rows), strict=True)
    stub = [name.ljust(max(map(len, names))) for name in names]
    lines = stub
    for column in columns:
        width = max(least_width, 2 + max(map(len, column)))
        if lines is not stub and len(lines[0]) + width > LINE_WIDTH:
            yield "\n".join(lines)
            lines = stub
        lines = [line + cell.rjust(width) for line, cell in zip(lines, column, strict=True)]
    if lines is not stub:
        yield "\n".join(lines)
