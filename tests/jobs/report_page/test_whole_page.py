"""The page with every section and its real drawings: well-formed, self-contained, escaped."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from jobs.report import format_table
from jobs.report_page.page import render_report
from tests.jobs.report_page.whole_report import PLACEMENTS, whole_report

VOID = {"meta"}
HOSTILE = "<script>alert('$x_{')</script>\"&\x1b[31m\ud800\x00"
SHOWN = "<script>alert('$x_{')</script>\"&\ufffd[31m\ufffd\ufffd"


@pytest.fixture(scope="module")
def page() -> str:
    """The page of a whole report."""
    return render_report(whole_report())


def parse(page: str) -> ET.Element:
    """The page as XML, which refuses what is not well-formed."""
    return ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


class Balance(HTMLParser):
    """Counts start tags that an HTML parser finds no end for, and notes scripts and ids."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_well_formed(page: str) -> None:
    """The page is XML and HTML with all tags closed and every id used once."""
    parse(page)
    html = Balance()
    html.feed(page)
    assert not html.open
    assert len(html.ids) == len(set(html.ids))


def test_loads_nothing(page: str) -> None:
    """The page has no address to load from and no script; references stay inside it."""
    assert "http://" not in page
    assert "https://" not in page
    assert "@import" not in page
    html = Balance()
    html.feed(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(html.seen)
    targets = re.findall(r"url\(#([^)]*)\)", page) + re.findall(r' href="#([^"]*)"', page)
    assert targets
    assert set(targets) <= set(html.ids)
    assert page.count("url(") == page.count("url(#")


def test_same_report_same_bytes() -> None:
    """The page and its drawings hold no time of their own and nothing random."""
    kept = {name: whole_report()[name] for name in ("run", "code_version", "origin", "wer")}
    assert render_report(kept) == render_report(kept)


def test_contents_lead_to_every_section(page: str) -> None:
    """The list of contents has the sections' titles, in order, as links to them."""
    root = parse(page)
    titles = [(f"#{each.get('id')}", each.findtext("h2")) for each in root.iter("section")]
    links = [(each.get("href"), each.text) for each in root.iter("a")]
    assert links == titles
    assert len(links) == 20


def test_any_text_of_the_store_is_escaped() -> None:
    """Markup, formulas and unprintable characters in ids, words and records arrive as text."""
    report = whole_report()
    report["run"] = f"runs/{HOSTILE}"
    report["recipe"] = {HOSTILE: HOSTILE}
    report["worst"]["model"] = HOSTILE
    report["worst"]["utterances"][0] |= {"utterance_id": HOSTILE, "words": [[HOSTILE, HOSTILE]]}
    speakers = report["speakers"].values()
    report["speakers"] = {f"{HOSTILE}{number}": each for number, each in enumerate(speakers)}
    report["wer"]["student"] = dict.fromkeys((*PLACEMENTS, HOSTILE), 50.0)
    report["werr"][HOSTILE] = -1.0
    report["origin"] |= {"machines": [HOSTILE], "commits": [HOSTILE]}
    step = next(iter(report["origin"]["steps"].values()))
    report["origin"]["steps"] = {HOSTILE: {**step, "machine": HOSTILE, "commit": HOSTILE}}
    report["waterfall"]["unlabelled"][0]["step"] = HOSTILE
    report["retries"][0] |= {"reasons": [HOSTILE], "command": HOSTILE}
    report["comparison"] |= {"run": HOSTILE, "not_paired": HOSTILE, "recipe": {HOSTILE: HOSTILE}}
    report["curves"] = {HOSTILE: report["curves"]["student"]}
    report["pace"] = {HOSTILE: report["pace"]["student"]}
    report["quarantine"] = {HOSTILE: {HOSTILE: 1}}
    (fault,) = report["device_faults"]["generate_targets"]
    report["device_faults"] = {HOSTILE: [dict.fromkeys(fault, HOSTILE)]}
    report["decoding"] = {HOSTILE: {HOSTILE: 1.0}}
    pair = {"planned": 1.0, "actual": 1.0}
    report["plan"] = {"calibrated_on": HOSTILE, "steps": {HOSTILE: {HOSTILE: pair}}}
    report["oracle"]["run"] = HOSTILE
    report["kbest_costs"]["by_placement"] = {HOSTILE: report["kbest_costs"]["all"]}
    page = render_report(report)
    page.encode()
    assert "<script" not in page
    assert "\x1b" not in page
    assert " ".join(parse(page).itertext()).count(SHOWN) > 40
    assert "\x1b" not in format_table(report)
