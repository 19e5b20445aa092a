"""The page in a real browser: nothing fails, every chart is drawn, and a phone shows all of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.report_page.page import render_report
from tests.jobs.report_page.browser import Browser, chromium
from tests.jobs.report_page.whole_report import whole_report

pytestmark = pytest.mark.cluster  # with the other programs that make faults installs

DESKTOP, PHONE = 1280, 390
NUM_FIGURES = 12
PAPERS = {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 29)"}

CLIPPED = """
Array.from(document.querySelectorAll('body *')).filter(element => {
  const box = element.getBoundingClientRect();
  // A wide table scrolls within its frame; the frame itself must fit.
  return box.width > 0 && !element.closest('.scroll table')
    && (box.right > document.documentElement.clientWidth + 1 || box.left < -1);
}).map(element => element.tagName + ' ' + element.textContent.slice(0, 60))
"""
DRAWN = """
Array.from(document.querySelectorAll('figure svg')).filter(svg => svg.getBoundingClientRect().width)
  .map(svg => {
    const frame = svg.getBoundingClientRect();
    const texts = Array.from(svg.querySelectorAll('text'));
    const outside = texts.filter(text => {
      const box = text.getBoundingClientRect();
      return box.right > frame.right + 2 || box.left < frame.left - 2;
    });
    return {
      height: frame.height,
      shapes: svg.querySelectorAll('path, use').length,
      letters: Math.min(...texts.map(text =>
        parseFloat(getComputedStyle(text).fontSize) * frame.width / svg.viewBox.baseVal.width)),
      outside: outside.map(text => text.textContent),
    };
  })
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a report with every section, as a file."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_report(whole_report()))
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of the file."""
    with chromium() as found:
        yield found


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [DESKTOP, PHONE])
def test_every_figure_is_drawn_and_nothing_is_clipped(
    browser: Browser, page: Path, width: int, scheme: str
) -> None:
    """No console message, no request, no overflow; letters of charts are 9 pixels or more."""
    browser.open(page, width, scheme)
    browser.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
    assert browser.complaints() == []
    assert browser.evaluate("document.documentElement.scrollWidth") == width
    assert browser.evaluate(CLIPPED) == []
    figures = browser.evaluate(DRAWN)
    assert len(figures) == browser.evaluate("document.querySelectorAll('figure').length")
    assert len(figures) == NUM_FIGURES
    for figure in figures:
        assert figure["height"] > 80
        assert figure["shapes"] > 5
        assert figure["letters"] >= 9
        assert figure["outside"] == []
    # The table that comes first needs no scrolling, not even on a phone.
    frame = "document.querySelector('#word-error-rates .scroll')"
    assert browser.evaluate(f"{frame}.scrollWidth - {frame}.clientWidth") <= 0
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == PAPERS[scheme]


def test_clipping_and_console_messages_are_noticed(browser: Browser, tmp_path: Path) -> None:
    """The questions above find a page that is too wide, and one that says or loads something."""
    path = tmp_path / "wide.html"
    path.write_text(
        '<meta name="viewport" content="width=device-width"/><body>'
        '<p style="width: 700px">wide</p><img src="missing.png">'
        "<script>console.error('no')</script></body>"
    )
    browser.open(path, PHONE)
    assert browser.evaluate(CLIPPED) == ["P wide"]
    assert {each["method"] for each in browser.complaints()} >= {
        "Runtime.consoleAPICalled",
        "Network.requestWillBeSent",
    }
