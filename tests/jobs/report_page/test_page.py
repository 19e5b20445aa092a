"""What the page says of a report, each fact as plain text; and what it leaves out."""

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from jobs.report_page import figures
from jobs.report_page.page import render_report
from jobs.report_page.wording import headline
from tests.jobs.report_page.whole_report import MACHINE, PLACEMENTS, whole_report

DASH, MINUS = "\N{EN DASH}", "\N{MINUS SIGN}"
BARE = {"run": "runs/demo", "code_version": "0.1.0"}

pytestmark = pytest.mark.usefixtures("plain_drawings")


@pytest.fixture
def report() -> dict[str, Any]:
    return whole_report()


def parse(report: dict[str, Any]) -> ET.Element:
    """The page as XML, which refuses what is not well-formed."""
    return ET.fromstring(render_report(report).removeprefix("<!DOCTYPE html>\n"))


def text_of(report: dict[str, Any]) -> str:
    """All that the page shows or reads out, with single blanks."""
    root = parse(report)
    labels = [element.get("aria-label", "") for element in root.iter("svg")]
    return " ".join(" ".join([*root.itertext(), *labels]).split())


def rows(report: dict[str, Any]) -> list[list[str]]:
    """The cells of every row of the page's tables."""
    return [[cell.text or "" for cell in row] for row in parse(report).iter("tr")]


FACTS = [
    "2026-11-24 09:30 UTC",
    "2.0 h of work, 2.5 h from the first step to the last",
    MACHINE,
    "8140d000f00d",
    "13.75 at the prices of the cluster files",
    "Over 12 speakers and 4,065 words together the WERR is 13.5 %, with a 95 % interval from "
    "10.1 to 16.9 %. If both models were equally good, a difference as large would come about "
    "with probability 0.0005.",
    "the student recovers 31.0 % of what the oracle gains on the baseline, with a 95 % "
    "interval from 22.0 to 40.0 %.",
    "this run's baseline on 0.30 h. Recovery is the share of the oracle's gain over the "
    "baseline that a model achieves. After sMBR, all three models have had it. The two runs "
    "are not known to",
    "A difference below 0 and a WERR above 0 favour this run.",
    "It covers 510 and 512 words, so the speakers are not the same.",
    f"speaker-03-0007-{'x' * 40} (speaker-03, DP5): 3 errors in 16 words",
    "The student makes fewer errors than the baseline for 12 of 12 speakers, and more for 0",
    "then no held-out speaker influences the choice",
    "612,345 parameters, 8 sub-epochs, 960,000 frames, 8.00 h, learning rates 0.002 to "
    "0.00025; a block ends about every 0.34 h (ticks on the axis)",
    "Throughput of student: 77 to 90 hours of speech an hour",
    "Ingest wrote metadata of 4,321 utterances, 6.00 h of all subsets, and quarantined "
    "9 utterances, 0.10 h.",
    "Of 5.00 h of unlabelled metadata 1.00 h were not selected, 0.10 h were quarantined, "
    "and 3.90 h are in training partitions; 0 lost",
    "this reads silent, truncated again:",
    "--step features/unlabelled --reason silent,truncated",
    "k = 20 highest logits of the teacher in each frame. They hold 98.77 % of its probability",
    "Verdict: 4 of 8 figures lie outside the range of 10 uniform orders",
    "about 1 would for a uniform order. Less mixed than any of them: design effect",
    "Examined: 51,200 chunks in 64 steps of 4 ranks.",
    "Wall-clock time, 910.0 s in total",
    f"from a calibration on {MACHINE}.",
]
"""Sentences of the header and of each section."""

ROWS = [
    ["DP2", "39.0", "33.0", "34.0", "19.3", "22.2"],
    ["mean", "45.0", "39.0", "40.0", "14.8", "17.8"],
    ["DP1", "baseline", "43.0", "37.5 to 48.5", "", "", ""],
    ["student", "37.1", "31.6 to 42.6", "13.5", "10.1 to 16.9", "0.0005"],
    ["student", "37.1", "31.6 to 42.6", "31.0", "22.0 to 40.0"],
    ["student", "37.1", "31.6 to 42.6", "none", ""],
    ["student", "4.0", "1.0 to 7.0", "0.03"],
    ["seconds, train_student", "50.0", "110.0"],
    ["selection.hours", "2.0", "4.0"],
    ["2.0", "2.00", "43.0 (38.0 to 48.0)", "39.0 (34.0 to 44.0)"],
    ["DP3", "baseline", "310", "20", "70", "400", "1,234"],
    ["baseline", "1,200", "87.5", "91.8", "12.8"],
    ["90", "1,100", "96.0", "90.9"],
    ["speaker-11", "51.7", "33.7", "46.3", "300"],
    ["student", "0.4", "3", "25.0"],
    ["DP5", "61.2", "61.2", "61.2"],
    ["partitions/unlabelled", "3.900", "0.000", "0.000", "3.900", "0"],
    ["features/unlabelled", "truncated", "5"],
    ["generate_targets", "cuda:3", "worker-7", "left out", "12", "no such device"],
    [
        *("DP5, 5,000 frames", "1", "44.00", "44.00", "0.0622", "0.0622", DASH),
        *("33.6", "33.6", "33.6"),
    ],
    ["realign", "1,000", "93", "7", "900", "60.0"],
    ["certify", "2026-11-24 09:30 UTC", MACHINE, "8140d000f00d", "1.25"],
    ["extract_features", "objects", "1,000,000", "1,100,000", "1.10"],
]
"""A row of each table."""


def test_facts_and_rows_of_each_section(report: dict[str, Any]) -> None:
    """None is missing."""
    shown, found = text_of(report), rows(report)
    assert [fact for fact in FACTS if fact not in shown] == []
    assert [row for row in ROWS if row not in found] == []


def test_tables_and_pictures_speak(report: dict[str, Any]) -> None:
    """Header cells have a scope, tables a caption, drawings a label."""
    root = parse(report)
    assert all(each.get("scope") in {"col", "row", "rowgroup"} for each in root.iter("th"))
    assert all(table.findtext("caption/span") for table in root.iter("table"))
    drawings = list(root.iter("svg"))
    assert len(drawings) == 2 * 12  # each for a desktop and for a phone
    assert all(each.get("role") == "img" and each.get("aria-label") for each in drawings)


def test_validation_is_relative_to_the_baselines_end() -> None:
    """Of this run, and of the one compared with, whose baseline is then the reference."""
    curves = {
        name: [{"validation_frame_accuracy": each} for each in accuracies]
        for name, accuracies in (("baseline", (0.2, 0.4)), ("student", (0.5, 0.7)))
    }
    drawing = figures.validation_curves(curves, {})
    assert drawing
    assert "at the end: baseline 0.0 %, student \N{MINUS SIGN}50.0 %" in drawing.wide
    other = {"baseline": [{"validation_frame_accuracy": 0.25}], "student": [{"loss": 1.0}]}
    drawing = figures.validation_curves(curves, other)
    assert drawing
    assert "baseline \N{MINUS SIGN}20.0 %, student \N{MINUS SIGN}60.0 %" in drawing.wide
    assert "baseline of the other run 0.0 %" in drawing.wide
    assert figures.validation_curves({"student": curves["student"]}, {}) is None


def test_parts_may_be_empty(report: dict[str, Any]) -> None:
    """Each part may be empty or null, or all of them absent; an empty section is left out."""
    for part in set(report) - set(BARE):
        assert parse({**report, part: {}}) is not None
    empty = {**dict.fromkeys(report), **BARE}
    for each in (BARE, empty, {**BARE, "plan": {"steps": {}}}):
        assert [title.text for title in parse(each).iter("h2")] == ["Recipe"]
        assert "has not been evaluated" in text_of(each)


@pytest.mark.parametrize(
    ("reductions", "stated"),
    [
        ((10.0, 20.0, 30.0, 40.0, 50.0), "lowers the word error rate of the supervised baseline "
         "by 30.0 % on average (mean WERR); it beats the baseline at every placement."),
        ((10.0, 20.0, 30.0, 0.0, 50.0), "it does not beat the baseline at DP4."),
        ((-10.0, -20.0, 5.0, -3.0, -2.0), "raises the word error rate of the supervised baseline "
         "by 6.0 % on average (mean WERR); it does not beat the baseline at DP1, DP2, DP4 and "
         "DP5."),
    ],
)  # fmt: skip
def test_the_headline(report: dict[str, Any], reductions: tuple[float, ...], stated: str) -> None:
    """The mean WERR, and the placements at which the student loses, or only draws."""
    report["werr"] = dict(zip(PLACEMENTS, reductions, strict=True))
    assert stated in text_of(report)


@pytest.mark.parametrize(
    ("errors", "stated"),
    [
        ((0, 0), "The baseline makes no error: there is nothing for the student to lower."),
        ((3, 4), "it does not beat the baseline at DP1 and clean."),
        ((0, 2), "Over 1 placement the student lowers"),
    ],
)
def test_a_placement_without_errors_has_no_reduction(
    report: dict[str, Any], errors: tuple[int, int], stated: str
) -> None:
    """The student may make some there, and of DP1's 4 fewer, as many or more."""
    of_student = {"clean": errors[0], "DP1": errors[1]}
    of_baseline = {"clean": 0.0, "DP1": 4.0 if errors[1] else 0.0}
    report["wer"] = {"baseline": of_baseline, "student": of_student}
    report["werr"] = {"DP1": 25.0 * (4 - errors[1])} if errors[1] else {}
    assert stated in headline(report)


def test_the_papers_rates_are_beside_its_own_placements_only(report: dict[str, Any]) -> None:
    """Table II is of DP1..DP5."""
    report["wer"] = {model: {"all": 40.0} for model in report["wer"]}
    assert "paper WERR" not in {cell for row in rows(report) for cell in row}


def test_reductions_after_sequence_training(report: dict[str, Any]) -> None:
    """They have a column beside the WERR before, with a mean."""
    assert "sMBR, %" not in text_of(report)
    report["werr_smbr"] = dict(zip(PLACEMENTS, (-1.0, 12.0, 13.0, 14.0, 17.0), strict=True))
    found = rows(report)
    heads = ["Placement", "baseline", "teacher", "student", "WERR", "WERR after sMBR", "paper WERR"]
    assert heads in found
    assert ["DP1", "33.0", "27.0", "28.0", "20.7", f"{MINUS}1.0", "9.8"] in found
    assert ["mean", "45.0", "39.0", "40.0", "14.8", "11.0", "17.8"] in found


def test_one_speaker_bounds_nothing(report: dict[str, Any]) -> None:
    """An interval without an end says so."""
    report["statistics"]["pooled"]["comparisons"][1]["reduction"] |= {"low": None, "high": None}
    assert f"interval from {MINUS}\N{INFINITY} to \N{INFINITY} %" in text_of(report)


def test_the_worst_utterances_are_shown_word_by_word(report: dict[str, Any]) -> None:
    """The transcript above what was decoded; a star stands for no word."""
    report["worst"]["utterances"][0]["words"] = [["see", "see"], ["", "the"], ["wasp", ""]]
    pairs = [each for each in parse(report).iter("span") if "pair" in each.get("class", "")]
    assert [[word.text for word in pair] for pair in pairs[:4]] == [
        ["transcript", "decoded"],
        ["see", "see"],
        ["*", "the"],
        ["wasp", "*"],
    ]
    assert ["error" in each.get("class", "") for each in pairs[:4]] == [False, False, True, True]


def test_runs_are_drawn_by_rising_hours_from_two_on(report: dict[str, Any]) -> None:
    """Whatever their order; one run alone has a table."""
    label = "Word error rates of the student by hours of unlabelled speech: "
    report["hours_curve"].reverse()
    assert f"{label}1.00 h 40.0 %, 2.00 h 39.0 %, 3.90 h 37.1 %" in text_of(report)
    del report["hours_curve"][1:]
    assert label not in text_of(report)
    assert ["3.9", "3.90", "43.0 (38.0 to 48.0)", "37.1 (32.1 to 42.1)"] in rows(report)


@pytest.mark.parametrize(
    ("numbers", "drawn"),
    [
        ({}, ""),
        (
            {"density": 0.125, "residual_norm": 3.5},
            "gradients sent, % 12.5, norm of a rank's residual 3.5",
        ),
        ({"block_update_norm": 0.25, "block_residual_norm": 0.0}, "norm of the block update 0.25"),
        (
            {"mean_staleness": 1.5, "max_staleness": 4},
            "mean staleness, exchanges 1.5, largest staleness, exchanges 4",
        ),
    ],
)
def test_what_trainers_exchanged_is_drawn(
    report: dict[str, Any], numbers: dict[str, float], drawn: str
) -> None:
    """A panel for each number that the model's trainer has; none for synchronous SGD."""
    for point in report["curves"]["student"]:
        point["trainer"] = {"bytes_sent": 1_500_000, **numbers}
    label = "What the trainer of student exchanged; at the end: "
    labels = [each.get("aria-label") or "" for each in parse(report).iter("svg")]
    assert [each for each in labels if label in each] == [f"{label}{drawn}"] * 2 * bool(drawn)
    shown = text_of(report)
    assert ("12.0 MB of gradients and models were sent" in shown) == bool(drawn)
    assert ("A residual that keeps growing" in shown) == ("residual_norm" in numbers)


def test_hours_that_no_manifest_has_are_marked(report: dict[str, Any]) -> None:
    """Within a step and between two, to the millisecond."""
    report["waterfall"]["unlabelled"][2]["out_ms"] -= 3
    assert "; 6 ms are in no manifest: run megahour verify." in text_of(report)
    (cell,) = [each for each in parse(report).iter("td") if each.text == "3 ms"]
    assert cell.get("class") == "worse"


def test_an_ensembles_targets_are_of_mean_posteriors(report: dict[str, Any]) -> None:
    """Their number is stated, and that each pass reads another offset."""
    report["targets"] |= {"num_teachers": 3, "offsets": "all"}
    stated = "of the mean posteriors of 3 teachers in each frame. They hold 98.77 % of their"
    assert stated in text_of(report)
    assert "frames at all three offsets; each pass reads the next one." in text_of(report)


@pytest.mark.parametrize(("mass", "is_low"), [(0.9499, True), (0.95, False), (0.99, False)])
def test_a_placement_that_keeps_too_little_is_named(
    report: dict[str, Any], mass: float, is_low: bool
) -> None:
    """On both sides of 0.95, at the recipe's k alone: at k = 1 less than half is kept."""
    costs = report["kbest_costs"]["all"]
    kept = {**costs, "k": {**costs["k"], "20": {**costs["k"]["20"], "mass": 0.99}}}
    low = {**costs, "k": {**costs["k"], "20": {**costs["k"]["20"], "mass": mass}}}
    report["kbest_costs"] |= {"by_placement": {"DP1": kept, "DP2": low}}
    warning = (
        "at k = 20 the targets hold less than 95% of the teacher's probability at DP2 (95.0 %)."
    )
    assert (warning in text_of(report)) == is_low
    assert ("Warning" in text_of(report)) == is_low


def test_values_outside_the_uniform_range_are_marked(report: dict[str, Any]) -> None:
    """Only those, by a class and by a sign: a design effect above it is worse, files are better."""
    cells = {
        row[-5].text: (row[-4].get("class"), row[-4].text)
        for row in parse(report).iter("tr")
        if len(row) >= 5
    }
    assert cells["design effect"] == ("worse", "10.50 !")
    assert cells["effective source files"] == ("better", "10.50 \N{BLACK UP-POINTING TRIANGLE}")
    assert render_report(report).count(">9.25</td>") == 4


def test_a_plan_without_calibration_says_so(report: dict[str, Any]) -> None:
    """Unknown quantities are dashes, and the note names the command."""
    seconds = {"planned": None, "actual": 90.0}
    requests = {"planned": 3_300, "actual": None}
    report["plan"] = {
        "calibrated_on": None,
        "steps": {"train_student": {"seconds": seconds, "requests": requests}},
    }
    assert ["train_student", "seconds", DASH, "90.0", DASH] in rows(report)
    assert ["requests", "3,300", DASH, DASH] in rows(report)
    assert "megahour plan --run was not run before" in text_of(report)


def test_unpaired_runs_and_unknown_commits_are_named(report: dict[str, Any]) -> None:
    """Why two runs have no test, and that installed code has no commit."""
    report["comparison"] |= {"pairs": [], "not_paired": "4 and 3 utterances"}
    report["origin"] |= {"commits": []}
    assert "There is no test of matched pairs: 4 and 3 utterances." in text_of(report)
    assert "not recorded" in text_of(report)


def test_an_oracle_that_learnt_less_is_none(report: dict[str, Any]) -> None:
    """The note says so, and names what the oracle lacks."""
    report["oracle"] |= {"labelled_hours": {"this": 4.1, "oracle": 4.1}, "lacks": "baseline_smbr"}
    assert "It was trained on no more than this run's baseline, so" in text_of(report)
    assert "The oracle has no baseline_smbr, so there is no recovery after" in text_of(report)


def test_the_certificate_may_lack_figures(report: dict[str, Any]) -> None:
    """A figure that is not defined is a dash; all within the range is a verdict, too."""
    figure = {"measured": None, **dict.fromkeys(("uniform", "uniform_low", "uniform_high"), 8.125)}
    part = {"num_samples": 4321, "num_steps": 17, "step": {"autocorrelation_16": figure}}
    report["certificate"] = {
        "num_ranks": 3,
        "uniform_run": {"effective_files": 123.4, "effective_speakers": 567.8},
        "whole_utterances": part,
    }
    shown = text_of(report)
    group = "whole utterances, minibatches of a step"
    assert [group, "autocorrelation, lag 16", DASH, "8.12", "8.12", "8.12"] in rows(report)
    assert "Examined: 4,321 whole utterances in 17 steps of 3 ranks." in shown
    assert "has 123.4 files and 567.8 speakers" in shown
    assert "all 1 figures lie within the range of 10 uniform orders." in shown


def test_long_lists_are_cut(report: dict[str, Any]) -> None:
    """A hundred speakers, the student's worst, and sixty settings; the captions say so."""
    report["speakers"] = {
        f"s{n:03}": {"reference_words": 200, "errors": {"baseline": n, "student": n}}
        for n in range(101)
    }
    report["comparison"]["recipe"] = {f"setting-{n}": n for n in range(70)}
    shown = text_of(report)
    assert "Word error rates by speaker, %; 100 of 101 speakers" in shown
    assert "s000" not in shown
    assert "the 40 speakers with the highest rates of the student are drawn" in shown
    assert "Settings that differ; 17 more are in report.json" in shown
