"""Calibrations: measured on the real functions, kept and read back, refused if they are wrong."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.cluster import Cluster, load_cluster
from infra.configuration import ConfigurationError
from jobs.planning.calibration.device_throughput import measure_device
from jobs.planning.calibration.throughputs import (
    HERE,
    Calibration,
    CoreRates,
    DeviceRates,
    ModelRate,
    read_calibration,
    read_published,
)
from jobs.planning.run_plan import STUDENT_PIPELINE, RunPlan, plan_run
from jobs.planning.step_plan import core_seconds, num_devices, plan_spark_step
from jobs.planning.volumes.step_volume import Requests, Volume, Work
from jobs.planning.volumes.training_volumes import num_training_frames
from jobs.planning.volumes.workload import planned_workload
from training.algorithms.optimizers import AdamConfig, SgdConfig
from training.augmentation.augmenter import AugmentationConfig
from training.fit.model_specs import student_fit, teacher_fit
from training.models.lstm import LstmModel
from training.models.registry import num_parameters
from training.recipes import read_recipe

REPOSITORY = Path(__file__).parents[3]
HOURS_1M = read_recipe(str(REPOSITORY / "jobs" / "recipes" / "hours_1m.toml"))
TINY = read_recipe(str(REPOSITORY / "tests" / "whole_path" / "tiny.toml"))
CORE = CoreRates(30_000, 2_000, 20_000, 10_000, 2e8)
RATE = ModelRate(1_000, 24_000_000)
CALIBRATION = Calibration(
    machine="a machine",
    core=CORE,
    store=read_published().store,
    devices={**read_published().devices, HERE: DeviceRates("a core", RATE, RATE, RATE)},
)


def plan(hours: float, calibration: Calibration = CALIBRATION) -> RunPlan:
    """A plan of the paper's configuration, on each step's own cluster."""
    workload = planned_workload(hours, 0.007 * hours)
    return plan_run(workload, HOURS_1M, calibration, load_cluster)


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    """Written as JSON, it reads back the same."""
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(asdict(CALIBRATION)))
    assert read_calibration(str(file)) == CALIBRATION


def test_published_figures_name_their_sources() -> None:
    """The paper's GPUs and S3, each with where its figures come from."""
    published = read_published()
    assert "003" in published.store.source
    assert {"p3.16xlarge"} == set(published.devices)
    assert all("paper" in rates.source for rates in published.devices.values())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cores": {}}, "unknown key cores: did you mean core"),
        ({"machine": None}, "machine"),
        ({"core": {**asdict(CORE), "extraction_x_real_time": 0}}, "need 1e-09"),
        ({"core": {**asdict(CORE), "decoding_speed": 1}}, "unknown key decoding_speed"),
        ({"devices": {"v100": {"source": "s"}}}, "student_training is missing"),
    ],
)
def test_wrong_calibrations_are_refused(tmp_path: Path, change: dict, message: str) -> None:
    """Unknown and missing keys, wrong types and impossible values name the key and a remedy."""
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps({**asdict(CALIBRATION), **change}))
    with pytest.raises(ConfigurationError, match=message):
        read_calibration(str(file))


@pytest.mark.parametrize(("text", "message"), [("[1]", "JSON object"), ("{", "not JSON")])
def test_files_that_are_no_calibration(tmp_path: Path, text: str, message: str) -> None:
    """A list, half a file, and no file."""
    file = tmp_path / "calibration.json"
    file.write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        read_calibration(str(file))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_calibration(str(tmp_path / "absent.json"))


@pytest.mark.parametrize("model", ["student", "teacher"])
def test_the_recipes_optimizer_is_timed(monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    """A step of SGD is shorter than one of Adam, so each model is timed with its own optimizer."""
    made: list[str] = []
    for kind in (AdamConfig, SgdConfig):
        make = kind.make_optimizer

        def noting(config: Any, parameters: Any, make: Any = make) -> Any:
            made.append(config.name)
            return make(config, parameters)

        monkeypatch.setattr(kind, "make_optimizer", noting)
    changed = replace(getattr(TINY, model), optimizer=SgdConfig())
    measure_device(replace(TINY, **{model: changed}), 1.0)
    assert made == (["sgd", "adam"] if model == "student" else ["adam", "sgd"])


def test_devices_without_a_figure_are_refused() -> None:
    """Neither measured nor published: the message says how to calibrate."""
    lone = replace(CALIBRATION, devices={})
    with pytest.raises(ConfigurationError, match=r"p3.16xlarge.*--calibrate-to"):
        plan(1_000.0, lone)


def test_parameters_are_counted_without_making_the_model() -> None:
    """The paper's student has about 24 M; small ones are counted as made."""
    assert num_parameters(HOURS_1M.models.student, 3_183) == pytest.approx(24e6, rel=0.02)
    made = LstmModel(TINY.models.student, 60)
    assert num_parameters(TINY.models.student, 60) == sum(p.numel() for p in made.parameters())


def test_a_model_twice_as_large_trains_half_as_fast() -> None:
    """Time goes as the number of parameters."""
    assert ModelRate(1_000, 10).of(20) == 500


def test_training_frames_are_those_of_the_sub_epochs() -> None:
    """One pass over the unlabelled hours and 18 over the labelled; twelve epochs of the teacher."""
    workload = planned_workload(1e6, 7_000)
    frames_an_hour = num_training_frames(teacher_fit(HOURS_1M), workload) / 12 / 7_000
    assert frames_an_hour == pytest.approx(120_000, rel=0.02)
    student = num_training_frames(student_fit(HOURS_1M), workload)
    # The look-ahead repeats three frames of each utterance of 119.
    assert student == pytest.approx((1e6 + 18 * 7_000) * frames_an_hour * 1.025, rel=0.01)
    slow = replace(teacher_fit(HOURS_1M), augmentation=AugmentationConfig(speed=(0.5, 1.0)))
    slow_frames_an_hour = num_training_frames(slow, workload) / 12 / 7_000
    assert slow_frames_an_hour == pytest.approx(1.5 * frames_an_hour)


def test_a_million_hours_on_the_papers_clusters() -> None:
    """The teacher takes the paper's two days or less, the student four and a half or less."""
    steps = {step.step: step for step in plan(1e6).steps}
    assert list(steps) == [
        "select_utterances",
        "extract_features",
        "train_baseline",
        "train_teacher",
        "generate_targets",
        "repartition",
        "train_student",
    ]
    days = {name: step.wall_seconds / 86_400 for name, step in steps.items()}
    assert 1.0 < days["train_teacher"] < 2.0
    assert 1.5 < days["train_student"] < 4.5
    assert sum(days[name] for name in STUDENT_PIPELINE) < 12
    assert plan(1e6).days == pytest.approx(sum(days[name] for name in STUDENT_PIPELINE))


@given(st.floats(200_000, 5e5))  # 16 and more waves of repartition, whose rounding shows
@settings(max_examples=5, deadline=None)
def test_twice_the_hours_cost_twice(hours: float) -> None:
    """Core-seconds, device-seconds and dollars are linear, but for the start and rounding."""
    for once, twice in zip(plan(hours).steps, plan(2 * hours).steps, strict=True):
        costs = ("core_seconds", "device_seconds", "dollars")
        # Selection has fewer tasks than its host has cores.
        for name in costs[:2] if once.step == "select_utterances" else costs:
            planned = 2 * getattr(once, name)
            assert getattr(twice, name) == pytest.approx(planned, rel=0.12), once.step


@given(st.floats(1e3, 1e6), st.sampled_from(list(asdict(CORE))))
@settings(max_examples=5, deadline=None)
def test_faster_cores_never_take_longer(hours: float, name: str) -> None:
    """A higher rate lowers or keeps every step's core-seconds and wall-clock time."""
    faster = replace(CORE, **{name: 2 * getattr(CORE, name)})
    slow, fast = plan(hours), plan(hours, replace(CALIBRATION, core=faster))
    for before, after in zip(slow.steps, fast.steps, strict=True):
        assert after.core_seconds <= before.core_seconds
        assert after.wall_seconds <= before.wall_seconds


def cluster(**changes: object) -> Cluster:
    """One instance of four cores that is no local process."""
    return replace(load_cluster("extract_features"), **changes)


def test_what_a_step_waits_for() -> None:
    """Cores, S3's latency, the network or devices: whichever takes longest, by hand."""
    one = cluster(num_instances=1, executors_per_instance=1, cores_per_executor=4, devices=("cpu",))
    work = Work(metadata_records=30_000 * 40)  # 40 core-seconds
    busy = plan_spark_step("s", Volume(tasks=8, work=work), one, CALIBRATION)
    assert (busy.bound, busy.core_seconds) == ("cores", 40.0)
    assert busy.wall_seconds == pytest.approx(6 + 10)
    reads = Volume(tasks=4, requests=Requests(get=32_000), small_reads=32_000)
    waiting = plan_spark_step("s", reads, one, CALIBRATION, gets_in_flight=32)
    assert waiting.bound == "S3 latency"
    assert waiting.wall_seconds == pytest.approx(6 + 32_000 * 0.2 / 32 / 4)
    large = Volume(tasks=4, bytes_read=250e9, small_reads=1, requests=Requests(get=1))
    assert plan_spark_step("s", large, one, CALIBRATION).wall_seconds == pytest.approx(6 + 1000)
    devices = plan_spark_step("s", Volume(tasks=4), one, CALIBRATION, device_seconds=100.0)
    assert (devices.bound, devices.wall_seconds) == ("devices", 106.0)
    assert devices.instance_dollars == pytest.approx(0.796 * 106 / 3600)


def test_tasks_run_in_waves() -> None:
    """Five tasks on four cores take as long as eight."""
    one = cluster(num_instances=1, executors_per_instance=1, cores_per_executor=4)
    seconds = {
        tasks: plan_spark_step(
            "s", Volume(tasks=tasks, work=Work(metadata_records=30_000 * tasks)), one, CALIBRATION
        ).wall_seconds
        for tasks in (4, 5, 8)
    }
    assert seconds[4] == pytest.approx(7)
    assert seconds[5] == seconds[8] == pytest.approx(8)


def test_devices_are_the_hosts_or_the_ranks() -> None:
    """64 GPUs for targets by the devices' list, 64 for the student by its ranks."""
    assert num_devices(load_cluster("generate_targets")) == 64
    assert num_devices(load_cluster("train_student")) == 64
    assert num_devices(load_cluster("train_teacher")) == 16
    assert num_devices(load_cluster("demo")) == 2


def test_core_seconds_add_up() -> None:
    """Each kind of work over its rate."""
    assert core_seconds(Work(30_000, 4_000, 60_000, 40_000, 1e9), CORE) == 1 + 2 + 3 + 4 + 5
