"""Reports of small runs, as the program makes them: what ingest lost, and a run beside another."""

from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from pipeline.records import Quarantined
from pipeline.runs.increment import record_bases
from pipeline.runs.manifest import manifest_uri, sha256
from pipeline.runs.names import INGEST_STEP, REPORT_DOCUMENT
from tests.job_programs import RunJob
from tests.jobs.report_page.reported_run import (
    TRANSCRIPT,
    document,
    report,
    text_of_page,
    try_to_report,
    write_reported_run,
    write_step,
)

pytestmark = pytest.mark.usefixtures("plain_drawings")

ERRORS = {"baseline": [4, 4, 4, 4], "teacher": [2, 2, 2, 2], "student": [3, 3, 3, 3]}
ROW = Quarantined("u-1", "u.flac", "missing_object", "", num_bytes=0, duration_ms=1_800_000)
NOTHING_LOST = "No utterance was quarantined: 0 lost."


def test_what_ingest_lost_is_in_the_report(run_job: RunJob, tmp_path: Path) -> None:
    """Its reasons, its stage of all subsets and a sentence; no command, as none reads it again.

    Its manifest is an input, so an ingest that came later makes the report again.
    """
    write_reported_run(tmp_path, ERRORS)
    report(run_job, tmp_path)
    assert NOTHING_LOST in text_of_page(tmp_path)
    assert "all subsets" not in document(tmp_path)["waterfall"]
    write_step(tmp_path, INGEST_STEP, [ROW, ROW])
    report(run_job, tmp_path)
    found = document(tmp_path)
    assert found["inputs"].keys() >= {INGEST_STEP}
    assert found["quarantine"][INGEST_STEP] == {"missing_object": 2}
    assert found["retries"] == []
    assert found["waterfall"]["all subsets"] == [
        {
            "step": INGEST_STEP,
            "in_ms": 10 * 3_600_000,
            "out_ms": 9 * 3_600_000,
            "unselected_ms": 0,
            "quarantined_ms": 3_600_000,
            "utterances_out": 9,
            "utterances_quarantined": 2,
        }
    ]
    shown = text_of_page(tmp_path)
    assert NOTHING_LOST not in shown
    assert "Ingest wrote metadata of 9 utterances, 9.00 h of all subsets, and quarantined" in shown
    assert "quarantined 2 utterances, 1.00 h. Of 9.00 h of unlabelled metadata" in shown
    assert "ingest it in another run, or in an increment of this one" in shown


@pytest.mark.parametrize("step", ["alignments/labelled", "alignments/bootstrap"])
def test_every_ledger_of_a_run_is_in_the_report(run_job: RunJob, tmp_path: Path, step: str) -> None:
    """An alignment's, too, though nothing else of its manifest is shown."""
    write_reported_run(tmp_path, ERRORS)
    write_step(tmp_path, step, [ROW])
    report(run_job, tmp_path)
    assert document(tmp_path)["quarantine"][step] == {"missing_object": 1}
    assert NOTHING_LOST not in text_of_page(tmp_path)


def test_lattices_ledgers_are_those_of_the_models_trained_on(
    run_job: RunJob, tmp_path: Path
) -> None:
    """A recipe without sequence training reads none."""
    write_reported_run(tmp_path, ERRORS)
    write_step(tmp_path, "lattices/baseline", [ROW])
    write_step(tmp_path, "models/baseline_smbr")
    report(run_job, tmp_path)
    assert "lattices/baseline" not in document(tmp_path)["quarantine"]
    trained_on = ("--set", "sequence_training.baseline=true")
    report(run_job, tmp_path, *trained_on)
    assert document(tmp_path)["quarantine"]["lattices/baseline"] == {"missing_object": 1}


def test_an_increment_counts_the_ingests_of_its_chain(run_job: RunJob, tmp_path: Path) -> None:
    """Other stages are of the union of all nights, so the ingest is, too."""
    first, second = tmp_path / "night-1", tmp_path / "night-2"
    record_bases(ObjectStore((str(tmp_path),)), str(second), str(first), "all")
    write_reported_run(second, ERRORS)
    write_step(first, INGEST_STEP, [ROW])
    write_step(second, INGEST_STEP, [ROW, ROW])
    report(run_job, second, "--set", f'corpus.uri="{tmp_path}/corpus"')
    found = document(second)
    assert found["quarantine"][INGEST_STEP] == {"missing_object": 3}
    (stage,) = found["waterfall"]["all subsets"]
    assert (stage["utterances_out"], stage["utterances_quarantined"]) == (18, 3)
    assert not Path(manifest_uri(str(first), "report")).exists()


def test_a_run_is_compared_with_another(run_job: RunJob, tmp_path: Path) -> None:
    """Each student error of four speakers, 4 of 10 words, becomes 3: WERR 25 %, p = 2/16.

    The other report is an input, by its digest; the page names the run and the settings.
    """
    here, there = tmp_path / "new", tmp_path / "old"
    write_reported_run(there, {**ERRORS, "student": [4, 4, 4, 4]})
    write_reported_run(here, ERRORS, "selection.seed=6")
    report(run_job, there)
    report(run_job, here, "--compare", str(there))
    found = document(here)
    other = (there / REPORT_DOCUMENT).read_bytes()
    assert found["inputs"][str(there / REPORT_DOCUMENT)] == sha256(other)
    comparison = found["comparison"]
    assert (comparison["run"], comparison["wer"]["student"]) == (str(there), {"all": 40.0})
    pairs = {each["model"]: each for each in comparison["pairs"]}
    assert pairs.keys() == ERRORS.keys()
    gained = pairs["student"]["reduction"]["value"], pairs["student"]["p_value"]
    assert gained == (25.0, pytest.approx(2 / 16))
    assert (pairs["teacher"]["reduction"]["value"], pairs["teacher"]["p_value"]) == (0.0, 1.0)
    shown = text_of_page(here)
    assert f"Compared with {there}." in shown
    assert "student 40.0 30.0 \N{MINUS SIGN}10.0" in shown
    assert "selection.seed 5 6" in shown


def test_a_run_of_other_utterances_is_compared_without_a_test(
    run_job: RunJob, tmp_path: Path
) -> None:
    """The rates stand side by side, and the page says why no pairs are tested."""
    here, there = tmp_path / "new", tmp_path / "old"
    write_reported_run(there, {model: counts[:3] for model, counts in ERRORS.items()})
    write_reported_run(here, ERRORS)
    report(run_job, there)
    report(run_job, here, "--compare", str(there))
    assert document(here)["comparison"]["pairs"] == []
    reason = "There is no test of matched pairs: 4 and 3 utterances: need the same ones."
    assert reason in text_of_page(here)


def test_runs_of_other_words_are_compared_without_a_test(run_job: RunJob, tmp_path: Path) -> None:
    """As after a change of spelling, which makes other errors of equal hypotheses."""
    here, there = tmp_path / "new", tmp_path / "old"
    write_reported_run(there, ERRORS, transcript=TRANSCRIPT.replace("lamp", "damp"))
    write_reported_run(here, ERRORS)
    report(run_job, there)
    report(run_job, here, "--compare", str(there))
    assert document(here)["comparison"]["pairs"] == []
    assert "need the same words" in document(here)["comparison"]["not_paired"]


def test_a_run_without_a_report_cannot_be_compared(run_job: RunJob, tmp_path: Path) -> None:
    """Exit code 1, with the report that is missing or damaged, and the command that makes it."""
    here, there = tmp_path / "new", tmp_path / "old"
    for run in (here, there):
        write_reported_run(run, ERRORS)
    remedy = f"run megahour report --run {there} "
    said = try_to_report(run_job, here, "--compare", str(there))
    assert said.code == 1
    assert f"{there / REPORT_DOCUMENT} is missing: {remedy}first" in said.err
    report(run_job, there)
    path = there / REPORT_DOCUMENT
    path.write_bytes(path.read_bytes().replace(b"0", b"1"))
    said = try_to_report(run_job, here, "--compare", str(there))
    assert said.code == 1
    assert f"{remedy}again" in said.err
    assert not (here / REPORT_DOCUMENT).exists()
