"""The page with every section and its real drawings: well-formed, self-contained, escaped."""

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest

from jobs.report_page import render_report
from tests.jobs.report_page.whole_report import MACHINE, PLACEMENTS, whole_report

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
    assert len(links) == 18


def test_origin_certainty_and_hours_are_stated(page: str) -> None:
    """Date, duration, machine, commit, dollars; the verdict; no hour lost; the command to retry."""
    shown = " ".join(parse(page).itertext())
    for fact in (
        "2026-11-24 09:30 UTC",
        "2.0 h of work, 2.5 h from the first step to the last",
        MACHINE,
        "8140d000f00d",
        "13.75 at the prices of the cluster files",
        "Verdict: 4 of 8 figures lie outside the range of 10 uniform orders",
        "of a uniform order about 1 would. Less mixed than any of them: design effect",
        "Ingest wrote metadata of 4,321 utterances, 6.00 h of all subsets, and quarantined "
        "9 utterances, 0.10 h.",
        "Of 5.00 h of unlabelled metadata 1.00 h were not selected, 0.10 h were quarantined, "
        "and 3.90 h are in training partitions; 0 lost",
        "this reads silent, truncated again:",
        "--step features/unlabelled --reason silent,truncated",
        "a block ends about every 0.34 h (ticks on the axis)",
        "The student makes fewer errors than the baseline for 12 of 12 speakers",
        "held out",
        "throughput, hours of speech an hour",
        "A difference below 0 and a WERR above 0 favour this run.",
        "the student recovers 31.0 % of what the oracle gains on the baseline, with a 95 % "
        "interval from 22.0 to 40.0 %.",
        "this run's from 0.30 h. Recovery is the share of the oracle's gain on the baseline that a "
        "model has; after sMBR all three have it. The two runs are not known to",
        "no held-out speaker then has a part in the choice",
        "It is of 510 and 512 words: not of the same speakers.",
    ):
        assert fact in shown


def test_values_outside_the_uniform_range_are_marked(page: str) -> None:
    """Only those, by a class and by a sign: a design effect above it is worse, files are better."""
    rows = {
        row[-5].text: row[-4] for row in parse(page).iter("tr") if len(row) >= 5 and row[-1].text
    }
    assert (rows["design effect"].get("class"), rows["design effect"].text) == ("worse", "10.50 !")
    files = rows["effective source files"]
    assert files.get("class") == "better"
    assert files.text is not None
    assert files.text.startswith("10.50 ")
    assert page.count(">9.25</td>") == 4


def test_any_text_of_the_store_is_escaped() -> None:
    """Markup, formulas and unprintable characters in ids, words and records arrive as text."""
    report = whole_report()
    report["run"] = f"runs/{HOSTILE}"
    report["worst"]["model"] = HOSTILE
    report["worst"]["utterances"][0] |= {"utterance_id": HOSTILE, "words": [[HOSTILE, HOSTILE]]}
    report["speakers"] = {
        f"{HOSTILE}{n}": each for n, each in enumerate(report["speakers"].values())
    }
    report["wer"]["student"] = dict.fromkeys((*PLACEMENTS, HOSTILE), 50.0)
    report["origin"] |= {"machines": [HOSTILE], "commits": [HOSTILE]}
    report["origin"]["steps"] = {
        HOSTILE: dict.fromkeys(("finished_at", "machine", "commit"), HOSTILE)
    }
    report["origin"]["steps"][HOSTILE]["dollars"] = None
    report["waterfall"]["unlabelled"][0]["step"] = HOSTILE
    report["retries"][0] |= {"reasons": [HOSTILE], "command": HOSTILE}
    report["comparison"] |= {"run": HOSTILE, "not_paired": HOSTILE, "recipe": {HOSTILE: HOSTILE}}
    report["curves"] = {HOSTILE: report["curves"]["student"]}
    report["pace"] = {HOSTILE: report["pace"]["student"]}
    page = render_report(report)
    page.encode()
    assert "<script" not in page
    assert "\x1b" not in page
    assert " ".join(parse(page).itertext()).count(SHOWN) > 30
