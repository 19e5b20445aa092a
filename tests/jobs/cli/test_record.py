"""What a job records: faults of devices, and metrics in Prometheus's text format."""

import re
from argparse import Namespace
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from infra.settings import ConfigurationError
from infra.store.object_store import ObjectStore
from infra.task_metrics import FAULTS, MeasuredFunction
from jobs.cli.command_line import Step, StepResults
from jobs.cli.job import Job, open_job
from jobs.cli.record import metrics_path, metrics_text, read_job_record, write_metrics
from jobs.report_page.collect import step_records
from jobs.run_table import GENERATE_TARGETS, REPARTITION
from pipeline.records import Tally
from pipeline.runs.engine import StepSpec, run_step
from pipeline.runs.names import TARGETS_STEP

REASON = "its server did not start: no such device"


def leave_out(number: int) -> int:
    """Leave out a device that is gone, as each task does that needs it."""
    FAULTS.add("cuda:3", "left out", REASON)
    return number


def run(job: Job) -> StepResults:
    """Run two tasks, and finish the step."""
    for number in range(2):
        job.tasks.add(MeasuredFunction(leave_out)(number))
    spec = StepSpec(job.store, job.run_uri, TARGETS_STEP, {})
    return [run_step(spec, lambda step: step.lossless(Tally(1, 1)))]


def test_a_job_says_which_devices_failed(tmp_path: Path) -> None:
    """On its last lines, with --json, and in its record, which the report reads."""
    options = {"recipe": "demo", "set": [], "trainers": {}, "cluster": "demo"}
    job = open_job(
        GENERATE_TARGETS, Namespace(run=str(tmp_path), dry_run=False, metrics_file=None, **options)
    )
    answer = Step(GENERATE_TARGETS, "", run).answer(job)
    host = gethostname()
    assert answer.text.splitlines()[-1] == f"  cuda:3 of {host}: left out on 2 tasks: {REASON}"
    (fault,) = answer.document["device_faults"]
    assert (fault["device"], fault["num_tasks"]) == ("cuda:3", 2)
    reading = Job(
        "report",
        job.recipe,
        job.run_uri,
        "",
        ObjectStore((str(tmp_path),)),
        job.cluster,
        job.arguments,
        is_leader=True,
    )
    assert step_records(reading)[GENERATE_TARGETS]["device_faults"] == [fault]


HELP = re.compile(r"# HELP (megahour_[a-z_]+) [^\n]+")
TYPE = re.compile(r"# TYPE (megahour_[a-z_]+) gauge")
LABEL = r'[a-z_]+="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"(megahour_[a-z_]+)\{{{LABEL}(?:,{LABEL})*\}} (-?[0-9.]+(?:e[+-]?[0-9]+)?)")

SUMMARY = {
    "step": "extract_features",
    "seconds": 12.5,
    "task_seconds": 20.25,
    "requests": {
        "get": 7,
        "put": 3,
        "head": 1,
        "list": 2,
        "retries": 1,
        "bytes_received": 1_000_000_000_000,
        "bytes_sent": 5,
    },
    "device_faults": [],
    "manifests": {
        'features/"odd"\\': {
            "utterances_in": 10,
            "utterances_out": 9,
            "quarantined": 1,
            "hours_in": 1.5,
            "hours_out": 1.25,
            "hours_quarantined": 0.25,
        }
    },
    "measures": {},
}


def parsed(text: str) -> dict[str, list[float]]:
    """Parse by a strict grammar: HELP, TYPE and samples of one family after the other."""
    families: dict[str, list[float]] = {}
    lines = text.splitlines()
    assert text.endswith("\n")
    while lines:
        helped, typed = HELP.fullmatch(lines.pop(0)), TYPE.fullmatch(lines.pop(0))
        assert helped
        assert typed
        assert helped[1] == typed[1]
        assert helped[1] not in families
        families[helped[1]] = []
        while lines and not lines[0].startswith("#"):
            sample = SAMPLE.fullmatch(lines.pop(0))
            assert sample
            assert sample[1] == helped[1]
            families[helped[1]].append(float(sample[2]))
        assert families[helped[1]]
    return families


def test_the_rounds_of_a_step_add_up(tmp_path: Path) -> None:
    """The record has the requests and the pace of both rounds; the same again changes nothing."""
    options = {"recipe": "demo", "set": ["targets.rounds=2"], "trainers": {}, "cluster": "demo"}
    arguments = Namespace(run=str(tmp_path), dry_run=False, metrics_file=None, **options)

    def record_of(*steps: str) -> dict[str, Any]:
        job = open_job(REPARTITION, arguments)

        def run(job: Job) -> StepResults:
            job.pace.update({step: [] for step in steps})
            specs = (StepSpec(job.store, job.run_uri, step, {}) for step in steps)
            return [run_step(spec, lambda step: step.lossless(Tally(1, 1))) for spec in specs]

        Step(REPARTITION, "", run).answer(job)
        found = read_job_record(job, REPARTITION)
        assert found is not None
        return found

    first = record_of("partitions/round_1")
    both = record_of("partitions/unlabelled")
    assert both["requests"]["put"] == 2 * first["requests"]["put"] > 0
    assert {*both["pace"]} == {"partitions/round_1", "partitions/unlabelled"}
    assert record_of("partitions/round_1", "partitions/unlabelled") == both


def test_metrics_are_in_base_units() -> None:
    """Seconds of audio for hours, bytes, Unix seconds; labels are escaped."""
    found = parsed(metrics_text(SUMMARY, 1_700_000_000.5))
    assert found["megahour_job_last_success_timestamp_seconds"] == [1_700_000_000.5]
    assert found["megahour_job_duration_seconds"] == [12.5]
    assert found["megahour_step_audio_out_seconds"] == [4500]
    assert found["megahour_step_utterances_quarantined"] == [1]
    assert found["megahour_job_store_requests"] == [7, 3, 1, 2, 1]
    assert found["megahour_job_store_bytes"] == [1e12, 5]
    assert r'step="features/\"odd\"\\"' in metrics_text(SUMMARY, 0)


def test_metrics_of_models_are_of_training_and_validation() -> None:
    """The last sub-epoch's loss and frame accuracy; those of speakers that no training reads."""
    measures = {"cross_entropy": 1.5, "frame_accuracy": 0.5, "validation_cross_entropy": 1.75}
    measured = {**SUMMARY, "measures": {"models/baseline": measures}}
    text = metrics_text(measured, 0)
    found = parsed(text)
    assert found["megahour_model_cross_entropy_nats"] == [1.5, 1.75]
    assert found["megahour_model_frame_accuracy_ratio"] == [0.5]
    assert 'step="models/baseline",data="validation"} 1.75' in text


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """No partial file stays, and the collector's ending is the finished file's alone."""
    path = metrics_path(str(tmp_path / "megahour.prom"))
    for text in ("first\n", "second\n"):
        write_metrics(path, text)
        assert path.read_text() == text
    assert [each.name for each in tmp_path.iterdir()] == ["megahour.prom"]
    for path in (tmp_path / "absent" / "x.prom", tmp_path):
        with pytest.raises(ConfigurationError, match=rf"--metrics-file {path}: need a file in a"):
            metrics_path(str(path))
