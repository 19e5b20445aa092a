"""Faults of devices in what a job prints, in its record, and so in the report."""

from argparse import Namespace
from pathlib import Path
from socket import gethostname

from infra.store.object_store import ObjectStore
from infra.task_metrics import FAULTS, MeasuredFunction
from jobs import report
from jobs.cli.catalogue import GENERATE_TARGETS
from jobs.cli.command_line import Step, StepResults
from jobs.cli.job import Job, open_job
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
    assert report.device_faults(report.step_records(reading)) == {GENERATE_TARGETS: [fault]}


def test_records_of_earlier_versions_have_no_faults() -> None:
    """A step without faults has no rows in the report."""
    assert report.device_faults({"train_student": {}, "ingest": {"device_faults": []}}) == {}
