"""The certify job and its section of the report page."""

import json
from pathlib import Path
from typing import Any

import pytest

from jobs.certify import format_certificate
from jobs.report_page import render_report
from pipeline.steps.repartition import RepartitionConfig, repartition
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


def figure(measured: float | None) -> dict[str, Any]:
    return {"measured": measured, "uniform": 8.125, "uniform_low": 7.5, "uniform_high": 8.5}


def test_the_report_page_shows_the_certificate_if_there_is_one() -> None:
    """A section with the figures, undefined ones as a dash; without a certificate, none."""
    report: dict[str, Any] = {"run": "runs/x", "code_version": "0", "certificate": {}}
    assert "<h2>Shuffle</h2>" not in render_report(report)
    names = ("effective_files", "design_effect", "autocorrelation_16")
    part = {
        "num_samples": 4321,
        "num_steps": 17,
        "step": {name: figure(7.654) for name in names},
        "rank": {name: figure(None) for name in names},
    }
    uniform = {"effective_files": 123.4, "effective_speakers": 567.8}
    report["certificate"] = {"num_ranks": 3, "uniform_run": uniform, "whole_utterances": part}
    page = render_report(report)
    assert "<h2>Shuffle</h2>" in page
    for shown in ("4,321", "17 steps of 3 ranks", "123.4 files", "567.8 speakers", "7.65", "8.12"):
        assert shown in page
    assert "whole utterances, minibatches of a rank" in page
    assert "<td>\N{EN DASH}</td>" in page
