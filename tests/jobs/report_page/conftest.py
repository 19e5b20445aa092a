"""Leave out the drawing where a test is about texts: it takes most of a page's time."""

import pytest
from markupsafe import Markup

from jobs.report_page import figures
from jobs.report_page.figures import Drawing


@pytest.fixture
def plain_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each drawing be an empty picture with its name and its label."""
    picture = Markup('<svg role="img" id="{}" aria-label="{}"></svg>')

    def drawn(_: object, name: str, label: str) -> Drawing:
        return Drawing(*(picture.format(f"{name}-{form}", label) for form in figures.FORMS))

    monkeypatch.setattr(figures, "drawn", drawn)
