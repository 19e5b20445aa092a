"""Draw the README's picture of the data flow, in a light and a dark variant.

`python -m docs.figures.data_flow` writes both; they are compared by tests/test_documents.py.
"""

from dataclasses import dataclass
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 1000, 436
BOX_WIDTH = 216
COLUMNS = (12, 265, 518, 771)  # left edges
ROWS = (42, 192, 342)  # top edges
HEIGHTS = (102, 102, 84)
SANS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


@dataclass(frozen=True)
class Palette:
    """Palette holds the colours of one theme; the page behind the picture stays visible."""

    ink: str
    soft: str
    line: str
    store: str
    spark: str
    torchrun: str
    local: str
    fills: dict[str, str]


PALETTES = {
    "light": Palette(
        ink="#1d2330",
        soft="#566074",
        line="#7a8396",
        store="#7a8396",
        spark="#2563b8",
        torchrun="#b26a00",
        local="#2f7d5b",
        fills={"store": "#f2f4f8", "spark": "#eaf1fb", "torchrun": "#fcf3e3", "local": "#e9f5ef"},
    ),
    "dark": Palette(
        ink="#e6eaf1",
        soft="#a5afc0",
        line="#8a94a6",
        store="#8a94a6",
        spark="#79b0f7",
        torchrun="#eab25a",
        local="#6fc7a0",
        fills={"store": "#20252e", "spark": "#16243a", "torchrun": "#2f2413", "local": "#14291f"},
    ),
}


@dataclass(frozen=True)
class Box:
    """Box is one step: `kind` says what runs it, `job` is its module in jobs/."""

    column: int
    row: int
    kind: str
    title: str
    lines: tuple[str, ...]
    job: str
    num_columns: int = 1


@dataclass(frozen=True)
class Arrow:
    """Arrow goes straight from point to point, in pixels; its label is centred on `label_at`."""

    start: tuple[float, float]
    end: tuple[float, float]
    label: str = ""
    label_at: tuple[float, float] = (0, 0)
    anchor: str = "middle"


BOXES = (
    Box(
        0,
        0,
        "store",
        "Object store",
        ("audio, and metadata as", "JSON lines; S3 or local"),
        "ingest",
    ),
    Box(
        1,
        0,
        "spark",
        "Select",
        ("hours drawn uniformly,", "whole speakers in a file"),
        "select_utterances",
    ),
    Box(
        2,
        0,
        "spark",
        "Extract features",
        ("64 log-mel, causal speaker", "mean, hierarchical shuffle"),
        "extract_features",
    ),
    Box(
        3,
        0,
        "spark",
        "Align",
        ("bootstrap HMM, senone tree;", "an LSTM realigns, in rounds"),
        "bootstrap, train_aligner, realign",
    ),
    Box(
        3,
        1,
        "torchrun",
        "Teacher, baseline",
        ("bidirectional LSTM; LSTM to", "compare the student with"),
        "train_teacher, train_baseline",
    ),
    Box(
        2,
        1,
        "spark",
        "Generate targets",
        ("the teacher's k = 20 best", "logits of every frame"),
        "generate_targets",
    ),
    Box(
        1,
        1,
        "spark",
        "Repartition",
        ("features and targets in", "partitions of 2 h"),
        "repartition",
    ),
    Box(
        0,
        1,
        "torchrun",
        "Student",
        ("labelled and unlabelled", "sub-epochs; GTC, BMUF, HTM"),
        "train_student",
    ),
    Box(
        0,
        2,
        "local",
        "Evaluate",
        (
            "Decode held-out speakers; report word error rates of baseline, teacher and student "
            "at each device placement, and WERR.",
        ),
        "evaluate, report",
        num_columns=4,
    ),
)


def middle(column: int) -> float:
    """Return the horizontal centre of a column, in pixels."""
    return COLUMNS[column] + BOX_WIDTH / 2


def between(row: int, columns: tuple[int, int], label: str = "") -> Arrow:
    """Return the arrow from one box to its neighbour in a row."""
    start, end = columns
    y = ROWS[row] + HEIGHTS[row] / 2
    rightwards = end > start
    x_start = COLUMNS[start] + (BOX_WIDTH if rightwards else 0)
    x_end = COLUMNS[end] + (0 if rightwards else BOX_WIDTH)
    return Arrow((x_start, y), (x_end, y), label, ((x_start + x_end) / 2, y - 9))


def down(column: int, row: int, label: str = "") -> Arrow:
    """Return the arrow from a box to the one below it."""
    x, top, bottom = middle(column), ROWS[row] + HEIGHTS[row], ROWS[row + 1]
    side, anchor = (-10, "end") if column == len(COLUMNS) - 1 else (10, "start")
    return Arrow((x, top), (x, bottom), label, (x + side, (top + bottom) / 2 + 4), anchor)


ARROWS = (
    between(0, (0, 1)),
    between(0, (1, 2)),
    between(0, (2, 3)),
    down(2, 0, "unlabelled"),
    down(3, 0, "labelled"),
    between(1, (3, 2)),
    between(1, (2, 1)),
    between(1, (1, 0)),
    down(0, 1),
    down(3, 1),
)


def text(at: tuple[float, float], content: str, colour: str, size: float, style: str = "") -> str:
    """Return an SVG text element; `style` holds further attributes."""
    x, y = at
    attributes = f'x="{x:g}" y="{y:g}" fill="{colour}" font-size="{size:g}"'
    return f"<text {attributes}{' ' + style if style else ''}>{escape(content, quote=False)}</text>"


def drawn_box(box: Box, palette: Palette) -> str:
    """Return a step's rectangle with its title, two lines and the name of its job."""
    x, y, height = COLUMNS[box.column], ROWS[box.row], HEIGHTS[box.row]
    width = COLUMNS[box.column + box.num_columns - 1] + BOX_WIDTH - x
    colour = getattr(palette, box.kind)
    job = f'font-family="{MONO}"'
    return "\n".join(
        [
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="10" '
            f'fill="{palette.fills[box.kind]}" stroke="{colour}" stroke-width="1.4"/>',
            text((x + 14, y + 27), box.title, palette.ink, 16, 'font-weight="600"'),
            *(
                text((x + 14, y + 47 + 17 * index), line, palette.soft, 12.5)
                for index, line in enumerate(box.lines)
            ),
            text((x + 14, y + height - 13), box.job, colour, 9.8, job),
        ]
    )


def drawn_arrow(arrow: Arrow, palette: Palette) -> str:
    """Return an arrow's line and its label."""
    (x1, y1), (x2, y2) = arrow.start, arrow.end
    gap_x, gap_y = (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)
    line = (
        f'<line x1="{x1 + 4 * gap_x:g}" y1="{y1 + 4 * gap_y:g}" x2="{x2 - 6 * gap_x:g}" '
        f'y2="{y2 - 6 * gap_y:g}" stroke="{palette.line}" stroke-width="1.6" '
        'marker-end="url(#head)"/>'
    )
    if not arrow.label:
        return line
    anchor = f'text-anchor="{arrow.anchor}" font-style="italic"'
    return line + "\n" + text(arrow.label_at, arrow.label, palette.soft, 12, anchor)


def legend(palette: Palette) -> list[str]:
    """Return the line above the steps that says what runs them."""
    entries = (("spark", "Spark"), ("torchrun", "torchrun"), ("local", "one process"))
    note = "Every step reads manifests of objects and commits its own, exactly once."
    drawn = [text((12, 24), note, palette.soft, 12.5)]
    for index, (kind, name) in enumerate(entries):
        x = 705 + 86 * index + 12 * (index == 2)
        swatch = f'fill="{palette.fills[kind]}" stroke="{getattr(palette, kind)}"'
        drawn.append(f'<rect x="{x}" y="13" width="13" height="13" rx="3" {swatch}/>')
        drawn.append(text((x + 19, 24), name, palette.soft, 12.5))
    return drawn


def data_flow(palette: Palette) -> str:
    """Return the whole picture as one SVG document."""
    head = (
        '<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6.5" '
        'markerHeight="6.5" orient="auto">'
        f'<path d="M0 0.6 L7 4 L0 7.4 z" fill="{palette.line}"/></marker></defs>'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" font-family="{SANS}">',
        "<title>Data flow of megahour, from audio in a store to word error rates</title>",
        head,
        *legend(palette),
        *(drawn_box(box, palette) for box in BOXES),
        *(drawn_arrow(arrow, palette) for arrow in ARROWS),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def pictures() -> dict[Path, str]:
    """Return each file of the picture with the text that belongs into it."""
    return {FOLDER / f"data_flow_{theme}.svg": data_flow(PALETTES[theme]) for theme in PALETTES}


if __name__ == "__main__":
    for path, picture in pictures().items():
        path.write_text(picture)
