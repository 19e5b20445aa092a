"""Describe what a section of the page holds, as plain text and numbers; layout.html renders it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from markupsafe import Markup


@dataclass(frozen=True, slots=True)
class Cell:
    """Cell is a table cell: its text, and a style class such as "best" or "worse"."""

    text: str
    kind: str = ""


Row = Sequence[Cell | str]
"""A table row: the first cell is its header."""


@dataclass(frozen=True, slots=True)
class Paragraph:
    """Paragraph is plain text; its kind is a style class such as "warning"."""

    form: ClassVar[str] = "paragraph"
    text: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Group is the rows of a table below one heading; "" is no heading."""

    name: str
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True, slots=True)
class Table:
    """Table is groups of rows; `foot` is a last row of means or sums, or no cells."""

    form: ClassVar[str] = "table"
    caption: str
    header: tuple[str, ...]
    groups: tuple[Group, ...]
    foot: tuple[Cell, ...] = ()

    @property
    def is_grouped(self) -> bool:
        """Return whether the first column heads groups."""
        return any(group.name for group in self.groups)


@dataclass(frozen=True, slots=True)
class Drawing:
    """Drawing is one chart as two finished `<svg>` elements: for a desktop and for a phone."""

    wide: Markup
    narrow: Markup


@dataclass(frozen=True, slots=True)
class Figure:
    """Figure is a drawing above its caption."""

    form: ClassVar[str] = "figure"
    drawing: Drawing
    caption: str


@dataclass(frozen=True, slots=True)
class Preformatted:
    """Preformatted is text whose lines and blanks count; it unfolds below its summary."""

    form: ClassVar[str] = "preformatted"
    summary: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """Command is a line for a shell, below a sentence that says what it does."""

    form: ClassVar[str] = "command"
    purpose: str
    line: str


@dataclass(frozen=True, slots=True)
class WordPair:
    """WordPair is a word of a transcript beside the decoded one; "" stands for none."""

    reference: str
    hypothesis: str

    @property
    def is_error(self) -> bool:
        """Return whether the two differ."""
        return self.reference != self.hypothesis


@dataclass(frozen=True, slots=True)
class AlignedUtterance:
    """AlignedUtterance is an utterance's title and its transcript, word beside decoded word."""

    title: str
    words: tuple[WordPair, ...]


@dataclass(frozen=True, slots=True)
class Alignments:
    """Alignments are utterances word by word; they unfold below their summary."""

    form: ClassVar[str] = "alignments"
    summary: str
    utterances: tuple[AlignedUtterance, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts are short answers by name, such as date and duration."""

    form: ClassVar[str] = "facts"
    by_name: tuple[tuple[str, str], ...]


Block = Paragraph | Table | Figure | Preformatted | Command | Alignments | Facts


@dataclass(frozen=True, slots=True)
class Section:
    """Section is a titled part of the page, with at least one block."""

    title: str
    blocks: tuple[Block, ...]

    @property
    def anchor(self) -> str:
        """Return the name by which the list of contents leads to it."""
        return self.title.lower().replace(" ", "-")


def printable(text: str) -> str:
    """Replace unprintable characters, such as terminal codes and lone surrogates, by U+FFFD."""
    return "".join(
        character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def number(value: float | None, digits: int = 1) -> str:
    """Format a number for a cell, with a true minus sign; None is a dash."""
    if value is None:
        return "\N{EN DASH}"
    return f"{value:,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def counted(count: int, noun: str) -> str:
    """Write a number of things, as in "1 word" and "2 words"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def hours_text(hours: float) -> str:
    """Write a duration in hours, or in minutes where it is below one hour."""
    return f"{number(hours, 2)} h" if hours >= 1 else f"{number(60 * hours)} min"


def paragraph(text: str, kind: str = "") -> Paragraph | None:
    """Make a paragraph; None of an empty text."""
    return Paragraph(text, kind) if text else None


def table(
    caption: str, header: Sequence[str], rows: Sequence[Row], foot: Row | None = None
) -> Table | None:
    """Make a table whose first column heads its rows; None without rows."""
    if not rows:
        return None
    return Table(caption, tuple(header), (Group("", _cells(rows)),), _row(foot) if foot else ())


def grouped_table(
    caption: str, header: Sequence[str], groups: Mapping[str, Sequence[Row]]
) -> Table | None:
    """Make a table of groups of rows; the first column heads a group, the second a row."""
    found = tuple(Group(name, _cells(rows)) for name, rows in groups.items() if rows)
    return Table(caption, tuple(header), found) if found else None


def section(title: str, *blocks: Block | None) -> Section | None:
    """Make a section of the blocks that are there; None without any."""
    found = tuple(block for block in blocks if block is not None)
    return Section(title, found) if found else None


def _cells(rows: Sequence[Row]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(_row(row) for row in rows)


def _row(row: Row) -> tuple[Cell, ...]:
    return tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in row)
