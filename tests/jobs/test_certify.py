"""The certify job: its table and its JSON object."""

import json
from pathlib import Path

import pytest

from jobs.certify import format_certificate
from pipeline.settings import RepartitionConfig
from pipeline.steps.repartition import repartition
from tests.job_programs import RunJob
from tests.small_corpus import local_store, serially
from tests.written_run import write_run

ARGUMENTS = ("--recipe", "demo", "--set", "student.minibatch_frames=64", "--ranks", "2", "--json")


@pytest.fixture(scope="module")
def run_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    store, run_uri, _ = local_store(tmp_path_factory.mktemp("certify"))
    write_run(store, run_uri, num_files=6, num_speakers=3, num_each=12, seed=2)
    repartition(store, run_uri, RepartitionConfig(5 / 3600, 2, 5), serially)
    return run_uri


def test_the_job_prints_a_table_and_one_json_object(run_job: RunJob, run_uri: str) -> None:
    """The table and the progress on standard error; the second time there is nothing to do."""
    arguments = ("certify", "--run", run_uri, *ARGUMENTS, "--steps", "4")
    first, second = (run_job(*arguments) for _ in range(2))
    assert first.code == 0, first.err
    assert "certify: done in " in first.err
    assert json.loads(first.out)["status"] == "done"
    assert json.loads(second.out)["status"] == "nothing to do"
    table = format_certificate(
        json.loads(Path(run_uri, "certificate/certificate.json").read_text())
    )
    assert table in first.err
    assert table in second.err
    assert "2 ranks; a uniform order of the whole run: 6.0 effective files" in table
