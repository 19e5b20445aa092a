"""Leave out the drawing where a test is about texts: it takes most of a page's time."""

import pytest
from markupsafe import Markup

from jobs.report_page import figures, other_runs, targets_and_shuffle
from jobs.report_page.blocks import Drawing, printable


@pytest.fixture
def plain_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each drawing be an empty picture with its name and its label."""
    picture = Markup('<svg role="img" id="{}" aria-label="{}"></svg>')

    def drawn(_: object, name: str, label: str) -> Drawing:
        forms = (f"{name}-wide", f"{name}-narrow")
        return Drawing(*(picture.format(each, printable(label)) for each in forms))

    for module in (figures, targets_and_shuffle, other_runs):
        monkeypatch.setattr(module, "drawn", drawn)
