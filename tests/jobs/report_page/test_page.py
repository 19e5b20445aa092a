"""The report page and the terminal table: true, self-contained, and safe with any text."""

import xml.etree.ElementTree as ET
from typing import Any

import pytest

from jobs.report_page import format_table, render_report

PLACEMENTS = ("DP1", "DP2", "DP3", "DP4", "DP5")
SCRIPT = "<script>alert('$x_{')</script>\"&"

pytestmark = pytest.mark.usefixtures("plain_drawings")


def curve(labelled: list[bool]) -> list[dict[str, Any]]:
    """Points of a curve that gets better by the sub-epoch."""
    return [
        {
            "labelled": kind,
            "learning_rate": 2e-3 / (sub_epoch + 1),
            "num_frames": 1000,
            "cross_entropy": 3.0 / (sub_epoch + 1),
            "frame_accuracy": sub_epoch / len(labelled),
        }
        for sub_epoch, kind in enumerate(labelled)
    ]


@pytest.fixture
def report() -> dict[str, Any]:
    """A whole report, the student better everywhere."""
    models = ("baseline", "teacher", "student")
    wer = {
        model: {name: 40.0 + place - 8.0 * rank for place, name in enumerate(PLACEMENTS)}
        for rank, model in enumerate(models)
    }
    errors = {"substitutions": 310, "insertions": 20, "deletions": 70, "reference_words": 1234}
    step = {"seconds": 12.5, "utterances_in": 1000, "utterances_out": 900, "quarantined": 7}
    return {
        "run": "s3://speech/runs/demo",
        "code_version": "0.1.0",
        "recipe": {"name": "demo", "selection": {"hours": 0.0}},
        "wer": wer,
        "werr": dict(zip(PLACEMENTS, (10.0, 20.0, 30.0, 40.0, 50.0), strict=True)),
        "word_errors": {model: dict.fromkeys(PLACEMENTS, errors) for model in models},
        "frame_accuracy": {model: dict.fromkeys(PLACEMENTS, 61.25) for model in models},
        "hours": {"labelled": 0.5, "unlabelled": 2.0, "heldout": 0.25},
        "steps": {"extract_features": step, "train_student": {**step, "seconds": 99.0}},
        "curves": {"baseline": curve([True] * 3), "student": curve([False, True] * 3)},
        "targets": {"k": 20, "mean_retained_mass": 0.98765, "num_frames": 4321},
        "quarantine": {"features/unlabelled": {"silent": 2, "truncated": 5}},
        "device_faults": {
            "generate_targets": [
                {
                    "host": "worker-7",
                    "device": "cuda:3",
                    "kind": "left out",
                    "reason": "no such device",
                    "num_tasks": 12,
                }
            ]
        },
        "models": {"student": {"num_parameters": 612_345}},
    }


def parse(page: str) -> ET.Element:
    """The page as XML, which refuses what is not well-formed."""
    return ET.fromstring(page.removeprefix("<!DOCTYPE html>\n"))


def text_of(page: str) -> str:
    """All that the page shows or reads out."""
    root = parse(page)
    labels = [element.get("aria-label", "") for element in root.iter("svg")]
    return " ".join([*root.itertext(), *labels])


def test_sections_in_order(report: dict[str, Any]) -> None:
    """The reader's questions, in order, and the facts that answer them."""
    page = render_report(report)
    titles = [element.text for element in parse(page).iter("h2")]
    assert titles == [
        "Word error rates",
        "Kinds of errors",
        "Frame accuracy",
        "Learning curves",
        "Data",
        "Quarantine",
        "Targets",
        "Steps",
        "Recipe",
    ]
    shown = text_of(page)
    for fact in ("1,234", "400", "61.2", "k = 20", "98.77 %", "4,321", "silent", "612,345", "99.0"):
        assert fact in shown
        assert {"generate_targets", "cuda:3", "worker-7", "left out", "12", "no such device"} <= {
            *parse(page).itertext()
        }


def test_tables_and_pictures_speak(report: dict[str, Any]) -> None:
    """Header cells have a scope, tables a caption, drawings a label."""
    root = parse(render_report(report))
    scopes = {"col", "row", "rowgroup"}
    assert all(header.get("scope") in scopes for header in root.iter("th"))
    assert all(table.find("caption") is not None for table in root.iter("table"))
    drawings = list(root.iter("svg"))
    assert len(drawings) == 2 * 4  # each for a desktop and for a phone
    assert all(drawing.get("role") == "img" and drawing.get("aria-label") for drawing in drawings)


@pytest.mark.parametrize(
    ("numbers", "titles"),
    [
        ({}, set()),
        ({"density": 0.125, "residual_norm": 3.5}, {"gradients sent, %", "a rank's residual"}),
        ({"block_update_norm": 0.25, "block_residual_norm": 0.0}, {"the block update"}),
        ({"mean_staleness": 1.5, "max_staleness": 4}, {"mean staleness", "largest staleness"}),
        (
            {"density": 0.125, "residual_norm": 3.5, "block_update_norm": 0.25},
            {"gradients sent, %", "a rank's residual", "the block update"},
        ),
    ],
)
def test_what_trainers_exchanged_is_drawn(
    report: dict[str, Any], numbers: dict[str, float], titles: set[str]
) -> None:
    """A panel for each number that the model's trainer has; none for synchronous SGD."""
    for point in report["curves"]["student"]:
        point["trainer"] = {"bytes_sent": 1_500_000, **numbers}
    root = parse(render_report(report))
    labels = [each.get("aria-label") or "" for each in root.iter("svg")]
    drawn = [label for label in labels if label.startswith("What the trainer of student exchanged")]
    assert len(drawn) == 2 * bool(numbers)
    shown = " ".join(root.itertext())
    assert ("9.0 MB of gradients and models were sent" in shown) == bool(numbers)
    assert ("A residual that keeps growing" in shown) == ("residual_norm" in numbers)
    numbered = {"mean staleness", "largest staleness", "a block's residual"}
    for title in {"gradients sent, %", "a rank's residual", "the block update"} | numbered:
        assert (title in " ".join(drawn)) == (title in titles)
    if "density" in numbers:
        assert "gradients sent, % 12.5" in drawn[0]


def test_headline_when_better_everywhere(report: dict[str, Any]) -> None:
    """The mean WERR is the mean of the placements', and the student is said to win at all."""
    expected = "by 30.0 % on average (mean WERR); it beats the baseline at every placement."
    assert expected in text_of(render_report(report))


@pytest.mark.parametrize("reduction", [-5.0, 0.0])
def test_headline_when_one_placement_is_lost(report: dict[str, Any], reduction: float) -> None:
    """The headline names the placement at which the student loses, or only draws."""
    report["werr"]["DP4"] = reduction
    for shown in (text_of(render_report(report)), " ".join(format_table(report).split())):
        assert "it does not beat the baseline at DP4." in shown
        assert "every placement" not in shown


def test_headline_when_worse_on_average(report: dict[str, Any]) -> None:
    """A negative mean is a rise, and all the placements lost are named."""
    report["werr"] = dict(zip(PLACEMENTS, (-10.0, -20.0, 5.0, -3.0, -2.0), strict=True))
    shown = text_of(render_report(report))
    assert "raises the word error rate of the supervised baseline by 6.0 % on average" in shown
    assert "does not beat the baseline at DP1, DP2, DP4 and DP5." in shown


def test_paper_beside_its_own_placements_only(report: dict[str, Any]) -> None:
    """Table II's reductions stand beside DP1..DP5, with their mean, and nowhere else."""
    (row,) = [
        [cell.text for cell in line]
        for line in parse(render_report(report)).iter("tr")
        if len(line) == 6 and line[0].text == "DP2"
    ]
    assert row == ["DP2", "41.0", "33.0", "25.0", "20.0", "22.2"]
    assert "17.8" in text_of(render_report(report))
    report["wer"] = {model: {"all": 40.0} for model in report["wer"]}
    assert "paper WERR" not in text_of(render_report(report))


def test_settings_chosen_on_development_speakers(report: dict[str, Any]) -> None:
    """A row for each tuned model, in the order of the models; no table where none was tuned."""
    assert "Decoding settings" not in text_of(render_report(report))
    of_student = {
        "acoustic_scale": 0.25,
        "ngram_order": 3,
        "language_model_scale": 1.0,
        "insertion_penalty": 0.5,
    }
    report["decoding"] = {"student": of_student, "baseline": {**of_student, "acoustic_scale": 0.1}}
    lines = [[cell.text for cell in line] for line in parse(render_report(report)).iter("tr")]
    header = lines.index(
        ["Model", "acoustic scale", "ngram order", "language model scale", "insertion penalty"]
    )
    assert lines[header + 1 : header + 3] == [
        ["baseline", "0.1", "3", "1", "0.5"],
        ["student", "0.25", "3", "1", "0.5"],
    ]


def test_reductions_after_sequence_training(report: dict[str, Any]) -> None:
    """They have a column beside the WERR before, with a mean, and a row in the terminal."""
    assert "sMBR" not in render_report(report) + format_table(report)
    report["werr_smbr"] = dict(zip(PLACEMENTS, (-1.0, 12.0, 13.0, 14.0, 17.0), strict=True))
    lines = [[cell.text for cell in line] for line in parse(render_report(report)).iter("tr")]
    heads = ["Placement", "baseline", "teacher", "student", "WERR", "WERR after sMBR", "paper WERR"]
    assert heads in lines
    assert ["DP1", "40.0", "32.0", "24.0", "10.0", "\N{MINUS SIGN}1.0", "9.8"] in lines
    assert ["mean", "42.0", "34.0", "26.0", "30.0", "11.0", "17.8"] in lines
    last = format_table(report).split("\n\n")[1].splitlines()[-1]
    assert last.split() == ["WERR", "after", "sMBR", "-1.0", "12.0", "13.0", "14.0", "17.0", "11.0"]


def test_untrusted_text_is_escaped(report: dict[str, Any]) -> None:
    """Markup, formulas and unprintable characters in any name arrive as text."""
    hostile = SCRIPT + "\x1b[31m\ud800\x00"
    report["run"] = f"runs/{hostile}"
    report["recipe"] = {hostile: hostile}
    report["quarantine"] = {hostile: {hostile: 1}}
    fault = dict.fromkeys(("host", "device", "kind", "reason"), hostile)
    report["device_faults"] = {hostile: [{**fault, "num_tasks": 1}]}
    report["steps"] = {hostile: report["steps"]["extract_features"]}
    report["curves"] = {hostile: curve([True, False])}
    report["models"] = {}
    for key in ("wer", "word_errors", "frame_accuracy"):
        report[key] = {hostile: {hostile: next(iter(report[key]["student"].values()))}}
    report["werr"] = {hostile: 1.0, "DP1": -1.0}
    report["decoding"] = {hostile: {hostile: 1.0}}
    page = render_report(report)
    page.encode()
    assert "<script" not in page
    assert "\x1b" not in page
    assert text_of(page).count("alert('$x_{')</script>\"&") > 10
    assert "\x1b" not in format_table(report)


def test_parts_may_be_empty(report: dict[str, Any]) -> None:
    """Each part may be empty, or all of them absent; the page is still whole."""
    for part in set(report) - {"run", "code_version"}:
        parse(render_report({**report, part: {}}))
        format_table({**report, part: {}})
    bare = {"run": "runs/demo", "code_version": "0.1.0"}
    assert "has not been evaluated" in text_of(render_report(bare))
    assert "has not been evaluated" in " ".join(format_table(bare).split())


def test_terminal_table(report: dict[str, Any]) -> None:
    """One line a model and the WERR below, columns aligned, at most 70 columns wide."""
    lines = format_table(report).split("\n\n")[1].splitlines()
    assert lines[0].split() == ["WER,", "%", *PLACEMENTS, "mean"]
    assert lines[-1].split() == ["WERR", "10.0", "20.0", "30.0", "40.0", "50.0", "30.0"]
    assert len({len(line) for line in lines}) == 1
    assert len(lines[0]) <= 70


def test_terminal_table_of_one_and_of_many_placements(report: dict[str, Any]) -> None:
    """One placement needs no mean; many are folded into blocks that fit the line."""
    report["wer"], report["werr"] = {"student": {"all": 30.0}}, {"all": 12.5}
    assert "mean" not in format_table(report)
    many = [f"kitchen {number}" for number in range(20)]
    report["wer"], report["werr"] = {"student": dict.fromkeys(many, 30.0)}, dict.fromkeys(many, 1.0)
    table = format_table(report)
    assert all(name in table for name in many)
    assert max(map(len, table.splitlines())) <= 70


def evaluated(report: dict[str, Any], high: float | None = 31.0) -> dict[str, Any]:
    """Return the report with what an evaluation says about speakers."""
    estimate = {"value": 20.0, "low": -4.25, "high": high}
    comparison = {
        "baseline": "baseline",
        "system": "student",
        "reduction": estimate,
        "p_value": 0.04,
        "share_without_gain": 0.02,
    }
    found = {
        "num_speakers": 12,
        "reference_words": 1234,
        "wer": {model: {"value": 40.0, "low": 35.5, "high": 44.5} for model in report["wer"]},
        "comparisons": [comparison],
    }
    worst = {
        "utterance_id": "u-7",
        "speaker_id": "ann",
        "placement": "DP1",
        "word_errors": {"substitutions": 1, "insertions": 1, "deletions": 0, "reference_words": 2},
        "words": [["see", "see"], ["", "the"], ["wasp", SCRIPT]],
    }
    return {
        **report,
        "statistics": {
            "num_resamples": 10_000,
            "seed": 17,
            "level": 95,
            "pooled": found,
            "by_placement": dict.fromkeys(PLACEMENTS, found),
        },
        "speakers": {
            name: {"reference_words": 50, "errors": {"baseline": 9, "teacher": 8, "student": wrong}}
            for name, wrong in (("ann", 5), ("bob", 25), (SCRIPT, 10))
        },
        "worst": {"model": "student", "utterances": [worst]},
    }


def test_certainty_is_stated(report: dict[str, Any]) -> None:
    """Intervals, the test, each speaker, and the worst utterance word by word are in the page."""
    page = render_report(evaluated(report))
    titles = [element.text for element in parse(page).iter("h2")]
    assert titles[:4] == ["Word error rates", "Certainty", "Kinds of errors", "Speakers"]
    shown = text_of(page)
    stated = (
        "Over 12 speakers and 1,234 words together the WERR is 20.0 %, with a 95 % interval from "
        "\N{MINUS SIGN}4.2 to 31.0 %. If both models were equally good, a difference as large "
        "would come about with probability 0.04."
    )
    for fact in (stated, "35.5 to 44.5", "all together", "10,000 draws of speakers", "50.0"):
        assert fact in shown
    assert shown.index("bob") < shown.rindex("ann")  # the student's worst speaker first
    assert "u-7 (ann, DP1): 2 errors in 2 words" in shown
    pairs = [each for each in parse(page).iter("span") if "pair" in each.get("class", "")]
    assert [[word.text for word in pair] for pair in pairs] == [
        ["transcript", "decoded"],
        ["see", "see"],
        ["*", "the"],
        ["wasp", SCRIPT],
    ]
    assert ["error" in pair.get("class", "") for pair in pairs] == [False, False, True, True]
    assert " ".join(format_table(evaluated(report)).split()).count(stated) == 1


def test_one_speaker_bounds_nothing(report: dict[str, Any]) -> None:
    """An interval without an end says so."""
    assert "to \N{INFINITY} %" in text_of(render_report(evaluated(report, high=None)))


def test_hours_are_a_table_and_from_two_runs_on_a_plot(report: dict[str, Any]) -> None:
    """Runs come by rising hours, whatever their order; without other runs there is no section."""
    assert "Hours of unlabelled speech" not in render_report(report)
    points = [
        {
            "run": f"s3://speech/runs/{SCRIPT}-{hours}",
            "hours": hours,
            "wer": {
                "baseline": {"value": 40.0, "low": 37.0, "high": 43.5},
                "student": {"value": 40.0 - hours, "low": 36.5 - hours, "high": 43.0 - hours},
            },
        }
        for hours in (20.0, 0.5, 5.0)
    ]
    page = render_report({**report, "hours_curve": points})
    root = parse(page)
    assert "<script" not in page
    text = " ".join(root.itertext())
    assert text.index("0.50 40.0") < text.index("5.00 40.0") < text.index("20.00 40.0")
    assert "35.0 (31.5 to 38.0)" in text
    drawn, _ = [each for each in root.iter("svg") if "by hours" in each.attrib["aria-label"]]
    assert drawn.attrib["aria-label"].endswith("0.50 h 39.5 %, 5.00 h 35.0 %, 20.00 h 20.0 %")
    alone = render_report({**report, "hours_curve": points[:1]})
    assert "Hours of unlabelled speech" in alone
    assert "by hours of unlabelled speech:" not in alone
