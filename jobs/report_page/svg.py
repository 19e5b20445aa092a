"""Turn matplotlib figures into inline SVG with the colours and the font of the page."""

import io
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager

import matplotlib.style
from matplotlib.figure import Figure

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


@contextmanager
def page_style() -> Iterator[None]:
    """Draw in the page's style, whatever the user's own matplotlib settings are."""
    with matplotlib.style.context(_STYLE, after_reset=True):
        yield


def inline_svg(figure: Figure, name: str, label: str) -> str:
    """Return an `<svg>` element; `name` makes its ids unique, `label` describes it."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    root = ET.fromstring(buffer.getvalue())  # noqa: S314 - drawn in the line above
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        plain = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        element.attrib = {key: _page_value(key, value, name) for key, value in plain.items()}
    root.attrib |= {"role": "img", "aria-label": label}
    return ET.tostring(root, encoding="unicode")


def _page_value(key: str, value: str, name: str) -> str:
    if key == "id":
        return f"{name}-{value}"
    if key == "href":
        return f"#{name}-{value.removeprefix('#')}"
    for colour, variable in _PAGE_COLOURS.items():
        value = value.replace(colour, variable)
    return value.replace("url(#", f"url(#{name}-")
