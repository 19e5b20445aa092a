"""The plan's command line: the table, the JSON, what is kept in a run, and wrong usage."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from infra.settings import ConfigurationError
from infra.store.object_store import ObjectStore
from jobs import plan as job
from jobs.plan import LINE_WIDTH, count, dollars, duration, size
from jobs.planning import measurement
from jobs.planning.calibration import HERE, TWO_CORES, read_calibration
from jobs.planning.run_plan import stored_calibration
from jobs.run_table import EVALUATE
from tests.job_programs import RunJob
from tests.jobs.planning.test_throughputs import CALIBRATION, PLANNED
from training.models.parameter_count import num_parameters
from training.settings.recipe import read_recipe

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def calibration_file(tmp_path: Path) -> str:
    """A calibration, so that nothing is measured."""
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(asdict(CALIBRATION)))
    return str(file)


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return what the plan prints, in this process."""
    job.plan_and_print(job.parser().parse_args(arguments))
    return capsys.readouterr().out


def test_the_table_answers_the_users_questions(
    capsys: pytest.CaptureFixture[str], calibration_file: str
) -> None:
    """Steps, units, sums, the paper's 12 days, and what is measured and assumed; aligned."""
    arguments = ("--hours", "1e6", "--heldout-hours", "50", "--dev-hours", "20")
    shown = planned(capsys, *arguments, "--calibration", calibration_file)
    assert max(map(len, shown.splitlines())) <= LINE_WIDTH
    made, takes = shown.split("\n\n")[1:3]
    for table in (made, takes):
        lines = table.splitlines()
        assert [line.split()[0] for line in lines[1:12]] == [*PLANNED, EVALUATE]
    assert made.splitlines()[0].split() == [
        *("step", "tasks", "objects", "GET", "PUT", "LIST", "requests", "read", "written")
    ]
    for fact in ("1e9 utterances", "46.4 TB", "40 x c4.4xlarge", "12 days", "7.6 of data", "$"):
        assert fact in shown
    for ground in (
        "Measured on one core (a machine)",
        "Devices of p3.16xlarge",
        "Assumed",
        "2025",
        "AN4",
    ):
        assert ground in shown


def test_the_shipped_clusters_keep_the_papers_days(capsys: pytest.CaptureFixture[str]) -> None:
    """A million hours: 12 days of the student's pipeline, 16 with all models, 5 of any step."""
    arguments = ("--hours", "1e6", "--calibration", TWO_CORES, "--json")
    document = json.loads(planned(capsys, *arguments))
    days = {name: each["wall_seconds"] / 86_400 for name, each in document["steps"].items()}
    assert document["student_pipeline_days"] <= 12
    assert sum(days.values()) <= 16
    assert max(days.values()) <= 5, days


def test_json_holds_all_of_it(capsys: pytest.CaptureFixture[str], calibration_file: str) -> None:
    """One object: workload, steps with volumes and dollars, days, the calibration."""
    arguments = ("--hours", "5e4", "--calibration", calibration_file, "--json")
    document = json.loads(planned(capsys, *arguments))
    step = document["steps"]["extract_features"]
    assert step["volume"]["requests"]["get"] > 5e7
    assert step["dollars"] == pytest.approx(step["instance_dollars"] + step["request_dollars"])
    assert document["paper_days"]["student pipeline"] == 12.0
    assert document["student_pipeline_days"] > 0
    assert document["calibration"]["machine"] == "a machine"


def test_a_run_keeps_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], calibration_file: str
) -> None:
    """`--run` leaves plan and calibration where the report finds them."""
    run_uri = str(tmp_path / "run")
    arguments = ("--hours", "100", "--calibration", calibration_file, "--run", run_uri)
    planned(capsys, *arguments, "--recipe", "demo")
    store = ObjectStore((run_uri,))
    assert stored_calibration(store, run_uri) == CALIBRATION
    kept = json.loads(store.get(f"{run_uri}/plan/plan.json"))
    assert kept["steps"]["extract_features"]["instance_type"] == "local"


def test_calibrate_to_writes_a_file_that_calibration_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured on the real steps and models, for the recipe; the same plan comes from the file."""
    monkeypatch.setattr(measurement, "AUDIO_SECONDS", 160)  # of 900, which only steady the rates
    file, tiny = str(tmp_path / "kept.json"), str(REPOSITORY / "tests/whole_path/tiny.toml")
    arguments = ("--hours", "10", "--recipe", tiny, "--utterance-seconds", "10")
    # On a thread's own stack: deep in pytest's, CPython 3.11 maps and unmaps memory at each call
    # that crosses the end of a chunk of frames: 64 s, not 13.
    with ThreadPoolExecutor(1) as thread:
        measured = thread.submit(planned, capsys, *arguments, "--calibrate-to", file).result()
    assert planned(capsys, *arguments, "--calibration", file) == measured
    calibration = read_calibration(file)
    assert calibration.core.extraction_x_real_time > 20
    assert calibration.core.repartition_x_real_time > 20
    recipe = read_recipe(tiny)
    expected = num_parameters(recipe.models.teacher, recipe.senones.max_senones)
    assert calibration.devices[HERE].teacher_forward.num_parameters == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--hours", "0"), "hours = 0: hours_1m selects all hours"),
        (("--hours", "-3"), "hours = -3.0: need more than 0"),
        (("--recipe", "demo"), "give --hours"),
        (("--utterances-per-request", "0.5"), "utterances per request = 0.5: need 1 to 10000"),
        (("--labelled-hours", "-1"), "labelled hours = -1.0"),
        (("--dev-hours", "-1"), "dev hours = -1.0: need 0 or more, at most 1e9"),
    ],
)
def test_wrong_values_name_the_bound(
    arguments: tuple[str, ...], message: str, calibration_file: str
) -> None:
    """The value, what is needed instead, and a remedy."""
    parsed = job.parser().parse_args([*arguments, "--calibration", calibration_file])
    with pytest.raises(ValueError, match=message):
        job.plan_and_print(parsed)


def test_an_utterance_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    """Its length is refused before anything is measured or planned."""
    with pytest.raises(SystemExit, match="2"):
        job.parser().parse_args(["--utterance-seconds", "0"])
    assert "--utterance-seconds: 0: need 0.01..3600" in capsys.readouterr().err


def test_exit_codes_and_help(run_job: RunJob, calibration_file: str) -> None:
    """Usage that is wrong exits with 2 and one line; --help explains."""
    failed = run_job("plan", "--hours", "1e6", "--calibration", f"{calibration_file}.absent")
    assert failed.code == 2
    assert failed.err.count("\n") == 1
    assert "cannot be read" in failed.err
    shown = run_job("plan", "--help")
    assert shown.code == 0
    assert "--calibrate-to" in shown.out


def test_the_run_states_its_hours(calibration_file: str, tmp_path: Path) -> None:
    """Without --hours an empty run is no source of hours, and the recipe's are taken."""
    parsed = job.parser().parse_args(["--run", str(tmp_path), "--calibration", calibration_file])
    store = ObjectStore((str(tmp_path),))
    recipe = SimpleNamespace(name="r", selection=SimpleNamespace(hours=50.0))
    workload = job.choose_workload(parsed, recipe, store, str(tmp_path))
    assert workload.hours("unlabelled") == 50.0
    recipe.selection.hours = 0.0
    with pytest.raises(ConfigurationError, match="--hours"):
        job.choose_workload(parsed, recipe, store, str(tmp_path))


def test_units_read_well() -> None:
    """Counts, bytes, durations and dollars in the units that people use."""
    assert [count(value) for value in (0, 4321, 999_999, 1e9, 1.5e12)] == [
        *("0", "4,321", "999,999", "1e9", "1.5e12")
    ]
    assert [size(value) for value in (12, 1.5e3, 46e12)] == ["12 B", "1.5 kB", "46 TB"]
    assert [duration(value) for value in (12, 120, 7200, 864_000)] == [
        *("12.0 s", "2.0 min", "2.0 h", "10.0 d")
    ]
    assert [dollars(value) for value in (0, 1.234, 1234)] == ["$0.00", "$1.23", "$1,234"]


@pytest.mark.parametrize(
    ("name", "gpu"), [("generate_targets_a10g", "A10G"), ("generate_targets_h100", "H100")]
)
def test_a_step_has_another_cluster(
    capsys: pytest.CaptureFixture[str], calibration_file: str, name: str, gpu: str
) -> None:
    """Its devices and price are that cluster's, and the other steps' as before."""
    given = "--hours", "1e6", "--calibration", calibration_file, "--json"
    before = json.loads(planned(capsys, *given))["steps"]
    shown = json.loads(planned(capsys, *given, "--step-cluster", f"generate_targets={name}"))
    after = shown["steps"]
    labelling, devices = after["generate_targets"], shown["calibration"]["devices"]
    assert gpu in devices[labelling["instance_type"]]["source"]
    for fact in ("device_seconds", "dollars"):
        assert labelling[fact] < before["generate_targets"][fact]
    del before["generate_targets"], after["generate_targets"]
    assert after == before


@pytest.mark.parametrize("text", ["generate=demo", "generate_targets", "generate_targets="])
def test_an_unknown_step_has_no_cluster(calibration_file: str, text: str) -> None:
    """The message names the value and the steps."""
    given = ["--hours", "1", "--calibration", calibration_file, "--step-cluster", text]
    with pytest.raises(ValueError, match=rf"--step-cluster {text}: need STEP=FILE, .*repartit"):
        job.plan_and_print(job.parser().parse_args(given))
