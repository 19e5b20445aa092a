"""The report job stores the newest report: of all inputs, with what other runs are beside it."""

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest

from infra.cluster import load_cluster
from infra.store.object_store import ObjectStore, StoreError, join_uri
from jobs import report
from jobs.cli.job import Job
from jobs.report_page.collect import dollars_of, origin_of, quarantine_reasons, retry_commands
from pipeline.records import Quarantined
from pipeline.runs.commit import step_context
from pipeline.runs.engine import write_manifest
from pipeline.runs.manifest import Manifest, manifest_uri, sha256
from pipeline.runs.names import (
    CERTIFICATE_STEP,
    EVALUATION_STEP,
    PLAN_DOCUMENT,
    REPORT_DOCUMENT,
    TARGETS_STEP,
    job_record,
)
from pipeline.runs.sealed_json import seal
from tests.jobs.job_records import RECORD, REPORTED_STEPS
from tests.whole_path.processes import TINY
from training.settings.recipe import read_recipe


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    """A run of empty steps, of which each report has another number."""
    numbers = iter(range(9))
    monkeypatch.setattr(report, "build_report", lambda _: {"number": next(numbers)})
    monkeypatch.setattr(report, "render_report", lambda found: f"page {found['number']}")
    monkeypatch.setattr(report, "format_table", lambda _: "")
    store, run_uri = ObjectStore((str(tmp_path),)), str(tmp_path)
    for step in REPORTED_STEPS:
        write_manifest(step_context(store, run_uri, step, {}, {}), Manifest(step, {}, {}, ()))
    arguments, recipe = (
        Namespace(json=False, curve=[], compare=None, oracle=None),
        read_recipe(str(TINY)),
    )
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


@pytest.mark.parametrize("changed", ["plan", "certificate", "record", "evaluation"])
def test_a_report_is_made_again_after_a_change(job: Job, changed: str) -> None:
    """A later plan, certificate, record or evaluation is an input: the report names its digest."""
    report.run(job)
    documents = {"plan": (PLAN_DOCUMENT, b"{}"), "record": (job_record("realign"), b"{}")}
    if changed in documents:
        key, data = documents[changed]
        job.store.put(join_uri(job.run_uri, key), data)
    else:
        step = {"certificate": CERTIFICATE_STEP, "evaluation": EVALUATION_STEP}[changed]
        key, data = step, Manifest(step, {"beam": 9}, {}, ()).to_bytes()
        job.store.put(manifest_uri(job.run_uri, step), data)
    again, unchanged = report.run(job), report.run(job)
    assert [each.was_finished for each in (*again, *unchanged)] == [False, True]
    assert again[0].manifest.inputs[key] == sha256(data)
    document = json.loads(Path(job.run_uri, REPORT_DOCUMENT).read_text())
    assert document["inputs"] == dict(again[0].manifest.inputs)


def test_what_teachers_failed_at_is_in_the_quarantine(job: Job) -> None:
    """Of the ledgers that steps wrote, with the counts of each reason; a command reads it again."""
    lost = Quarantined("a", "a.wav", "teacher_failed", "NaN", num_bytes=0, duration_ms=9)
    ledger = step_context(job.store, job.run_uri, TARGETS_STEP, {}, {}).put_ledger("0", [lost] * 2)
    assert ledger is not None
    manifests = {
        TARGETS_STEP: Manifest(TARGETS_STEP, {}, {}, (), (ledger,)),
        EVALUATION_STEP: Manifest(EVALUATION_STEP, {}, {}, (), (ledger,)),
    }
    reasons = quarantine_reasons(manifests, [])
    assert reasons == {TARGETS_STEP: {"teacher_failed": 2}}
    assert retry_commands(reasons, "runs/my own", "demo", ["a.b=1"]) == [
        {
            "step": TARGETS_STEP,
            "reasons": ["teacher_failed"],
            "command": "megahour retry --recipe demo --set a.b=1 --run 'runs/my own' "
            "--reason teacher_failed",
        }
    ]
    for step in ("selection/dev", "ingest", "alignments/labelled", "lattices/baseline"):
        assert retry_commands({step: {"missing_object": 1}}, "run", "demo", []) == []


def test_dollars_are_instances_by_the_hour_and_requests_to_s3() -> None:
    """2 instances at $3 for half an hour, and 1,000 PUTs at $0.005; on disk requests are free."""
    requests = {**RECORD["requests"], "put": 1000, "retries": 7}
    record = {**RECORD, "seconds": 1800, "requests": requests}
    assert dollars_of(record, is_in_s3=True) == pytest.approx(3.005)
    early = {**record, "seconds": 60, "finished_at": "2026-11-24T09:00:00+00:00", "commit": ""}
    found = origin_of({"realign": early, "evaluate": record}, "runs/mine")
    assert (found["dollars"], found["steps"]["realign"]["dollars"]) == (3.1, 0.1)
    assert (found["step_seconds"], found["elapsed_seconds"]) == (1860, 3660)
    assert (found["machines"], found["commits"]) == (["a machine"], ["abc"])


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
        job,
        cluster=load_cluster("demo"),
        arguments=Namespace(json=False, curve=[str(other)], compare=None, oracle=None),
    )
    report.run(beside)
    curve = json.loads(Path(job.run_uri, REPORT_DOCUMENT).read_text())["hours_curve"]
    assert [(point["hours"], point["wer"]["student"]["value"]) for point in curve] == [
        (5.0, 30.0),
        (1.0, 35.0),
    ]
    path.write_bytes(seal({"run": str(other), "hours": {"unlabelled": 1.0}}))
    with pytest.raises(ValueError, match=r"other: its report has no intervals .*several speakers"):
        report.run(beside)
    path.write_bytes(path.read_bytes().replace(b"1.0", b"2.0"))
    with pytest.raises((ValueError, StoreError), match=r"run megahour report --run .*other again"):
        report.run(beside)
