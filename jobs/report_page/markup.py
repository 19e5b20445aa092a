"""Make HTML elements from plain text; every text is escaped here and nowhere else."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class Cell:
    """Cell is a table cell: its text, and a style class such as "best" or "worse"."""

    text: str
    kind: str = ""


Row = Sequence[Cell | str]
"""A table row: the first cell is its header."""


def printable(text: str) -> str:
    """Replace unprintable characters, such as terminal codes and lone surrogates, by U+FFFD."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def text(value: object) -> str:
    """Escape untrusted text for an element or an attribute."""
    return escape(printable(str(value)))


def number(value: float | None, digits: int = 1) -> str:
    """Format a number for a cell, with a true minus sign; None is a dash."""
    if value is None:
        return "\N{EN DASH}"
    return f"{value:,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def paragraph(content: str, kind: str = "") -> str:
    """Make a paragraph of plain text."""
    return f"<p{_class(kind)}>{text(content)}</p>"


def section(title: str, *parts: str) -> str:
    """Make a titled section of finished elements; "" if all of them are empty."""
    content = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{text(title)}</h2>\n{content}\n</section>" if content else ""


def figure(svg: str, caption: str) -> str:
    """Make a figure of a finished drawing and its caption."""
    return (
        f'<figure><div class="scroll">{svg}</div><figcaption>{text(caption)}</figcaption></figure>'
    )


def details(summary: str, content: str) -> str:
    """Make a collapsed block of preformatted text."""
    lines = "\n".join(text(line) for line in content.splitlines())
    return f"<details><summary>{text(summary)}</summary><pre>{lines}</pre></details>"


def table(caption: str, header: Sequence[str], rows: Sequence[Row], foot: Row | None = None) -> str:
    """Make a table whose first column heads its rows; `foot` is a last row of means or sums."""
    if not rows:
        return ""
    body = "\n".join(f"<tr>{_header(row[0], 'row')}{_data(row[1:])}</tr>" for row in rows)
    last = f"<tfoot><tr>{_header(foot[0], 'row')}{_data(foot[1:])}</tr></tfoot>" if foot else ""
    return _table(caption, header, f"<tbody>\n{body}\n</tbody>{last}")


def grouped_table(caption: str, header: Sequence[str], groups: Mapping[str, Sequence[Row]]) -> str:
    """Make a table of groups of rows; the first column heads a group, the second a row."""
    bodies = "\n".join(_group(name, rows) for name, rows in groups.items() if rows)
    return _table(caption, header, bodies, "grouped") if bodies else ""


def _table(caption: str, header: Sequence[str], bodies: str, kind: str = "") -> str:
    columns = "".join(_header(name, "col") for name in header)
    return (
        f'<div class="scroll"><table{_class(kind)}><caption>{text(caption)}</caption>\n'
        f"<thead><tr>{columns}</tr></thead>\n{bodies}</table></div>"
    )


def _group(name: str, rows: Sequence[Row]) -> str:
    head = f'<th scope="rowgroup" rowspan="{len(rows)}">{text(name)}</th>'
    lines = [f"{_header(row[0], 'row')}{_data(row[1:])}" for row in rows]
    lines[0] = head + lines[0]
    return "<tbody>" + "\n".join(f"<tr>{line}</tr>" for line in lines) + "</tbody>"


def _header(cell: Cell | str, scope: str) -> str:
    content = cell.text if isinstance(cell, Cell) else cell
    return f'<th scope="{scope}">{text(content)}</th>'


def _data(cells: Row) -> str:
    full = [cell if isinstance(cell, Cell) else Cell(cell) for cell in cells]
    return "".join(f"<td{_class(cell.kind)}>{text(cell.text)}</td>" for cell in full)


def _class(kind: str) -> str:
    return f' class="{text(kind)}"' if kind else ""
