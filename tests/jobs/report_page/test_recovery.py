"""An oracle beside a run: what teacher and student recover of its gain, and what is refused."""

import re
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from infra.store.object_store import ObjectStore
from jobs.report_page.wording import recovery_statement
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.manifest import sha256
from pipeline.runs.names import GRAPH_STEP, REPORT_DOCUMENT, REPORT_PAGE, SCRATCH_FOLDER
from tests.job_programs import RunJob, Said
from tests.jobs.report_page.reported_run import (
    TRANSCRIPT,
    document,
    report,
    text_of_page,
    try_to_report,
    utterances,
    write_reported_run,
    write_step,
)
from training.evaluate.scores import SpeakerCounts, resample

pytestmark = pytest.mark.usefixtures("plain_drawings")

ERRORS = {"baseline": [8, 6, 5, 7], "teacher": [4, 5, 4, 5], "student": [6, 5, 3, 7]}
SMBR = {"baseline_smbr": [7, 6, 5, 6], "teacher_smbr": [4, 4, 4, 4], "student_smbr": [5, 4, 3, 6]}
ORACLE = [2, 3, 3, 2]
"""Of 26, 18, 21 and 10 errors: the oracle gains 16, teacher and student 8 and 5."""

MADE, GIVEN = sha256(b"an ARPA"), sha256(b"another")
UNKNOWN = "The two runs are not known to decode with the same language model."


def oracle_errors(*models: str, oracle: Sequence[int] = ORACLE) -> dict[str, Sequence[int]]:
    """Return the errors of an oracle's run; what its teacher and student learn is of no account."""
    return dict.fromkeys(("baseline", "teacher", "student", *models), oracle)


class Runs:
    """Runs holds a run and an oracle's run, which are reported as the program does it."""

    def __init__(self, run_job: RunJob, folder: Path) -> None:
        self.here, self.there = folder / "mine", folder / "oracle"
        self._run_job = run_job

    def write(
        self,
        oracle: Mapping[str, Sequence[int]],
        here: Mapping[str, Sequence[int]] = ERRORS,
        transcript: str = TRANSCRIPT,
        arpa: str = "",
        arpa_here: str = "",
    ) -> None:
        """Write both, and report the oracle's, whose transcripts and ARPA may be its own."""
        write_reported_run(self.here, here, arpa=arpa_here)
        write_reported_run(self.there, oracle, transcript=transcript, arpa=arpa)
        report(self._run_job, self.there)

    def beside_oracle(self, *options: str) -> Said:
        return try_to_report(self._run_job, self.here, "--oracle", str(self.there), *options)

    def document(self) -> dict[str, Any]:
        return document(self.here)

    def shown(self) -> str:
        return text_of_page(self.here)

    def rows(self) -> list[list[str | None]]:
        """Return the rows of the page's table, from the model on."""
        page = (self.here / REPORT_PAGE).read_text().removeprefix("<!DOCTYPE html>\n")
        (table,) = [
            each
            for each in ET.fromstring(page).iter("table")
            if "recovery" in [cell.text for cell in each.iter("th")]
        ]
        rows = [[cell.text for cell in row][-5:] for row in table.iter("tr")]
        return [row for row in rows[1:] if len(row) == 5]


@pytest.fixture
def runs(run_job: RunJob, tmp_path: Path) -> Runs:
    return Runs(run_job, tmp_path)


def test_recovery_is_the_share_of_the_oracles_gain(runs: Runs) -> None:
    """(26 - 18) / (26 - 10) = 50 % and (26 - 21) / 16 = 31.25 %, by placement and over all.

    Terminal, page and JSON show them; the oracle's report is an input, by its digest.
    """
    runs.write(oracle_errors())
    said = runs.beside_oracle()
    assert said.code == 0, said.err
    found = runs.document()
    digest = sha256((runs.there / REPORT_DOCUMENT).read_bytes())
    assert found["inputs"][str(runs.there / REPORT_DOCUMENT)] == digest
    oracle = found["oracle"]
    assert oracle["run"] == str(runs.there)
    for scores in (oracle["pooled"], oracle["by_placement"]["all"]):
        assert scores["wer"]["oracle"]["value"] == 25.0
        assert {name: each["value"] for name, each in scores["recovery"].items()} == {
            "teacher": 100 * 8 / 16,
            "student": 100 * 5 / 16,
        }
    text = " ".join(said.out.split())
    low, high = (f"{oracle['pooled']['recovery']['student'][end]:.1f}" for end in ("low", "high"))
    assert "the student recovers 31.2 % of what the oracle gains on the baseline" in text
    assert f"with a 95 % interval from {low} to {high} %." in text
    assert "oracle 25.0 WERR" in text
    assert f"31.2 ({low} to {high})" in text
    rate = oracle["pooled"]["wer"]["student"]
    row = [
        "student",
        "52.5",
        f"{rate['low']:.1f} to {rate['high']:.1f}",
        "31.2",
        f"{low} to {high}",
    ]
    assert row in runs.rows()
    shown = runs.shown()
    assert "so it is not an oracle for this run." in shown
    assert f"The oracle is the baseline of {runs.there}. It was trained on 9.00 h of" in shown


def test_intervals_are_those_of_the_same_draws_of_speakers(runs: Runs) -> None:
    """They are the library's own, of the speakers' counts."""
    runs.write(oracle_errors())
    assert runs.beside_oracle().code == 0
    drawn = resample(SpeakerCounts.of(utterances({**ERRORS, "oracle": ORACLE})))
    pooled = runs.document()["oracle"]["pooled"]
    for model in ("teacher", "student"):
        expected = drawn.recovery("baseline", model, "oracle")
        assert expected.low < expected.value < expected.high
        assert pooled["recovery"][model] == expected.to_json()
    assert pooled["wer"]["oracle"] == drawn.word_error_rate("oracle").to_json()
    assert pooled["wer"]["student"] == runs.document()["statistics"]["pooled"]["wer"]["student"]


SMBR_OPTIONS = tuple(
    part for name in ERRORS for part in ("--set", f"sequence_training.{name}=true")
)


def write_sequence_trained(runs: Runs, *of_oracle: str) -> None:
    """Write a run whose three models have sMBR, and an oracle with some of its own."""
    runs.write(oracle_errors(*of_oracle), here={**ERRORS, **SMBR})
    for name in SMBR:
        write_step(runs.here, f"models/{name}")
        write_step(runs.here, f"lattices/{name.removesuffix('_smbr')}")


def test_after_smbr_recovery_is_against_the_oracle_after_it(runs: Runs) -> None:
    """The student gains 24 - 18 errors, the oracle 24 - 10: 42.9 %; before it all is as it was."""
    write_sequence_trained(runs, "baseline_smbr")
    said = runs.beside_oracle(*SMBR_OPTIONS)
    assert said.code == 0, said.err
    found = runs.document()["oracle"]
    assert found["lacks"] == ""
    recovery = {name: each["value"] for name, each in found["pooled"]["recovery"].items()}
    assert recovery == pytest.approx(
        {
            "teacher": 50.0,
            "student": 31.25,
            "teacher_smbr": 100 * 8 / 14,
            "student_smbr": 100 * 6 / 14,
        }
    )
    assert "After sMBR: over all words the student recovers 42.9 %" in " ".join(said.out.split())
    before = ["baseline", "teacher", "student", "oracle"]
    assert [row[0] for row in runs.rows()] == [*before, *(f"{name}_smbr" for name in before)]


def test_nothing_is_recovered_after_smbr_where_the_oracle_had_none(runs: Runs) -> None:
    """The recovery before sMBR is there, and the page says what the oracle lacks."""
    write_sequence_trained(runs)
    assert runs.beside_oracle(*SMBR_OPTIONS).code == 0
    found = runs.document()["oracle"]
    assert found["lacks"] == "baseline_smbr"
    assert found["pooled"]["recovery"].keys() == {"teacher", "student"}
    assert "The oracle has no baseline_smbr, so there is no recovery after sMBR." in runs.shown()


def test_a_run_of_labelled_speech_alone_has_nothing_to_recover() -> None:
    """It has no student, of which the statement would be."""
    of_teacher = {"teacher": {"value": 50.0, "low": 40.0, "high": 60.0}}
    report_beside = {"oracle": {"level": 95, "pooled": {"recovery": of_teacher}}}
    assert recovery_statement(report_beside) == ""


@pytest.mark.parametrize("oracle", [[8, 6, 5, 7], [9, 9, 9, 9]])
def test_where_the_oracle_gains_nothing_none_is_recovered(
    runs: Runs, oracle: Sequence[int]
) -> None:
    """Of no gain, and of a loss, there is no share: the cell says none."""
    runs.write(oracle_errors(oracle=oracle))
    said = runs.beside_oracle()
    assert said.code == 0, said.err
    assert runs.document()["oracle"]["pooled"]["recovery"] == {"teacher": None, "student": None}
    assert "the oracle gains nothing on the baseline: none of it is recovered." in " ".join(
        said.out.split()
    )
    assert re.search(r"all +none +none", said.out)
    shares = {str(row[0]): row[3] for row in runs.rows()}
    assert shares == {"baseline": None, "teacher": "none", "student": "none", "oracle": None}


@pytest.mark.parametrize(
    ("oracle", "transcript", "why"),
    [
        (oracle_errors(oracle=[2, 2, 2]), TRANSCRIPT, "3 and 4 utterances: need the same ones"),
        (
            oracle_errors(),
            TRANSCRIPT.replace("lamp", "damp"),
            "'see the wasp that sat on my lamp and would' here and "
            "'see the wasp that sat on my damp and would' there: need the same words",
        ),
    ],
)
def test_an_oracle_of_other_utterances_or_words_is_refused(
    runs: Runs, oracle: dict[str, Sequence[int]], transcript: str, why: str
) -> None:
    """Exit code 1 with the value, the bound and the remedy; nothing is stored."""
    runs.write(oracle, transcript=transcript)
    said = runs.beside_oracle()
    assert said.code == 1
    remedy = "give the oracle's run the held-out list of this run, and report it again"
    assert f"--oracle {runs.there}: " in said.err
    assert f"{why}; {remedy}" in said.err
    assert not (runs.here / REPORT_DOCUMENT).exists()


def test_an_oracle_without_a_report_is_refused(runs: Runs) -> None:
    """The error names the command that makes it."""
    write_reported_run(runs.here, ERRORS)
    said = runs.beside_oracle()
    assert said.code == 1
    assert f"run megahour report --run {runs.there} first" in said.err


@pytest.mark.parametrize(
    ("here", "there", "is_same"),
    [
        ("", "", False),
        ("", MADE, True),
        ("", GIVEN, False),
        (GIVEN, MADE, False),
        (GIVEN, GIVEN, True),
    ],
)
def test_the_page_says_whether_the_language_model_is_the_same(
    runs: Runs, here: str, there: str, is_same: bool
) -> None:
    """It is where the oracle reads an ARPA that this run made, or the same one."""
    runs.write(oracle_errors(), arpa=there, arpa_here=here)
    scratch = f"{GRAPH_STEP}/{SCRATCH_FOLDER}"
    context = step_context(ObjectStore((str(runs.here),)), str(runs.here), scratch, {}, {})
    assert context.put_output("arpa-3", ".arpa", b"an ARPA", Tally()).sha256 == MADE
    assert runs.beside_oracle().code == 0
    assert runs.document()["oracle"]["has_same_language_model"] is is_same
    assert (UNKNOWN in runs.shown()) is not is_same
