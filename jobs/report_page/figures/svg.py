"""Turn matplotlib figures into inline SVG with the colours and the font of the page."""

import io
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import dataclass

import matplotlib.style
from markupsafe import Markup
from matplotlib.figure import Figure

from jobs.report_page.blocks import Drawing, printable

INK, FAINT = "#000001", "#000002"
SERIES = ("#000003", "#000004", "#000005")
_PAGE_COLOURS = {
    INK: "var(--ink)",
    FAINT: "var(--line)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES, 1)},
}
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "megahour",
    "text.parse_math": False,  # names are untrusted, and a lone $ is no formula
    "font.size": 10,
    "lines.linewidth": 1.4,
    "axes.titlesize": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": FAINT,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}
_NO_METADATA = {"Creator": None, "Date": None, "Format": None, "Type": None}


@dataclass(frozen=True, slots=True)
class Form:
    """Form is a drawing's width in inches, and whether its panels are below each other."""

    width: float
    is_narrow: bool

    def figure(self, height: float, num_panels: int = 1) -> Figure:
        """Make an empty figure for so many panels, each `height` inches high."""
        rows = num_panels if self.is_narrow else 1
        return Figure(figsize=(self.width, rows * height))

    def grid(self, num_panels: int) -> tuple[int, int]:
        """Return the rows and columns of so many panels."""
        return (num_panels, 1) if self.is_narrow else (1, num_panels)


FORMS = {"wide": Form(7.4, is_narrow=False), "narrow": Form(3.7, is_narrow=True)}
"""A phone shows the narrow form at its full size, where the wide one's letters would be 6 px."""


def drawn(draw: Callable[[Form], Figure], name: str, label: str) -> Drawing:
    """Draw both forms in the page's style, whatever the user's own matplotlib settings are.

    `name` makes the ids unique; `label` describes the drawing.
    """
    with matplotlib.style.context(_STYLE, after_reset=True):
        wide, narrow = (
            _inline_svg(draw(form), f"{name}-{kind}", printable(label))
            for kind, form in FORMS.items()
        )
    return Drawing(wide, narrow)


def _inline_svg(figure: Figure, name: str, label: str) -> Markup:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    root = ET.fromstring(buffer.getvalue())  # noqa: S314 - drawn in the line above
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        plain = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib = {key: _page_value(key, value, name) for key, value in plain.items()}
    root.attrib |= {"role": "img", "aria-label": label}
    # ElementTree has escaped every text and attribute of the drawing.
    return Markup(ET.tostring(root, encoding="unicode"))  # noqa: S704


def _page_value(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return f"#{name}-{value.removeprefix('#')}"
    for colour, variable in _PAGE_COLOURS.items():
        value = value.replace(colour, variable)
    return value.replace("url(#", f"url(#{name}-")
