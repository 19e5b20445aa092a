"""The report job stores a report again and again, but never one of other inputs."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from infra.cluster import load_cluster
from infra.store.object_store import ObjectStore, StoreError
from jobs import report
from jobs.cli.job import Job
from pipeline.records import Quarantined
from pipeline.runs.commit import step_context
from pipeline.runs.manifest import Manifest, manifest_uri
from pipeline.runs.names import EVALUATION_STEP, REPORT_DOCUMENT, TARGETS_STEP
from pipeline.runs.sealed_json import seal
from pipeline.runs.step import write_manifest
from tests.whole_path.processes import TINY
from training.recipes import read_recipe


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A run of empty steps, of which each report has another number."""
    numbers = iter(range(9))
    monkeypatch.setattr(report, "build_report", lambda _: {"number": next(numbers)})
    monkeypatch.setattr(report, "render_report", lambda found: f"page {found['number']}")
    monkeypatch.setattr(report, "format_table", lambda _: "")
    store, run_uri = ObjectStore((str(tmp_path),)), str(tmp_path)
    for step in report.READS:
        write_manifest(step_context(store, run_uri, step, {}, {}), Manifest(step, {}, {}, ()))
    arguments, recipe = Namespace(json=False, curve=[]), read_recipe(str(TINY))
    return Job("report", recipe, run_uri, "", store, None, arguments, is_leader=True)


def stored(job: Job) -> tuple[int, str]:
    folder = Path(job.run_uri, "report")
    number = json.loads((folder / "report.json").read_text())["number"]
    return number, (folder / "report.html").read_text()


def test_each_call_stores_the_report_again(job: Job, tmp_path: Path) -> None:
    """The manifest is that of the first; a report that was damaged is whole again."""
    (first,) = report.run(job)
    (tmp_path / "report" / "report.json").write_text("damaged")
    (second,) = report.run(job)
    assert (first.was_finished, second.was_finished) == (False, True)
    assert stored(job) == (1, "page 1")


def test_a_report_of_other_inputs_replaces_none(job: Job) -> None:
    """The evaluation was made again: the call fails before it stores anything."""
    report.run(job)
    other = Manifest(EVALUATION_STEP, {"beam": 9}, {}, ())
    job.store.put(manifest_uri(job.run_uri, EVALUATION_STEP), other.to_bytes())
    with pytest.raises(ValueError, match=r"report/manifest.json was made from .* evaluation: "):
        report.run(job)
    assert stored(job) == (0, "page 0")


def test_what_teachers_failed_at_is_in_the_quarantine(job: Job) -> None:
    """Of the ledgers that steps wrote, with the counts of each reason."""
    lost = Quarantined("a", "a.wav", "teacher_failed", "NaN", num_bytes=0, duration_ms=9)
    ledger = step_context(job.store, job.run_uri, TARGETS_STEP, {}, {}).put_ledger("0", [lost] * 2)
    assert ledger is not None
    manifests = {
        TARGETS_STEP: Manifest(TARGETS_STEP, {}, {}, (), (ledger,)),
        EVALUATION_STEP: Manifest(EVALUATION_STEP, {}, {}, (), (ledger,)),
    }
    assert report.quarantine_reasons(job, manifests) == {TARGETS_STEP: {"teacher_failed": 2}}


def rates(student: float) -> dict[str, object]:
    """Return a report's statistics: the baseline at 40 %, each rate within 3 points."""
    values = {"baseline": 40.0, "student": student}
    wer = {
        name: {"value": value, "low": value - 3, "high": value + 3}
        for name, value in values.items()
    }
    return {"statistics": {"pooled": {"wer": wer}}}


def test_a_curve_has_the_run_and_the_reported_runs_beside_it(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each point is a run's hours and its rates; a damaged report, and none, name the remedy."""
    own = {"number": 0, "run": job.run_uri, "hours": {"unlabelled": 5.0}, **rates(30)}
    monkeypatch.setattr(report, "build_report", lambda _: dict(own))
    other = tmp_path / "other"
    path = other / REPORT_DOCUMENT
    path.parent.mkdir(parents=True)
    path.write_bytes(seal({"run": str(other), "hours": {"unlabelled": 1.0}, **rates(35)}))
    beside = replace(
        job, cluster=load_cluster("demo"), arguments=Namespace(json=False, curve=[str(other)])
    )
    report.run(beside)
    curve = json.loads(Path(job.run_uri, REPORT_DOCUMENT).read_text())["hours_curve"]
    assert [(point["hours"], point["wer"]["student"]["value"]) for point in curve] == [
        (5.0, 30.0),
        (1.0, 35.0),
    ]
    path.write_bytes(seal({"run": str(other), "hours": {"unlabelled": 1.0}}))
    with pytest.raises(
        ValueError, match=r"other: its report has no intervals .*evaluate and report"
    ):
        report.run(beside)
    path.write_bytes(path.read_bytes().replace(b"1.0", b"2.0"))
    with pytest.raises((ValueError, StoreError), match=r"run megahour report --run .*other again"):
        report.run(beside)
