"""Calibrations: measured on the real functions, kept and read back, refused if they are wrong."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from infra.cluster import Cluster, load_cluster
from infra.settings import ConfigurationError
from jobs.plan import format_plan
from jobs.planning import measurement
from jobs.planning.calibration import (
    HERE,
    TWO_CORES,
    Calibration,
    CoreRates,
    DeviceRates,
    ModelRate,
    read_calibration,
    read_published,
)
from jobs.planning.measurement import measure_device
from jobs.planning.run_plan import (
    BESIDE_THE_PIPELINE,
    RunPlan,
    StepPlan,
    plan_part,
    plan_run,
    planned_workload,
)
from jobs.run_table import BUILD_GRAPH, CERTIFY, EVALUATE, INGEST, REPORT, STEPS
from jobs.volumes import (
    DETERMINIZING_WORK,
    RAW_LATTICE_BYTES,
    ModelPass,
    Requests,
    Volume,
    Workload,
    num_tuned_settings,
    training_frames,
)
from pipeline.runs.names import LABELLED
from training.evaluate.tuning import recipe_settings, search
from training.evaluate.word_errors import WordErrors
from training.fit.model_specs import sequence_fit, student_fit, teacher_fit
from training.models.parameter_count import num_parameters
from training.settings.decoding import DecodingSettings, TuningConfig
from training.settings.model_training import AugmentationConfig, SequenceTrainingConfig
from training.settings.recipe import AlignmentConfig, Recipe, read_recipe
from training.settings.trainers import SgdConfig
from training.trainers.trainer import make_optimizer

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
    search=read_published().search,
    pool=read_published().pool,
)


UNPLANNED = INGEST, BUILD_GRAPH, EVALUATE, CERTIFY, REPORT
PLANNED = [step for step in STEPS if step not in UNPLANNED]
"""The steps of a plan without held-out hours, in order."""


def plan(hours: float, calibration: Calibration = CALIBRATION) -> RunPlan:
    """A plan of the paper's configuration, on each step's own cluster."""
    workload = planned_workload(hours, 0.007 * hours)
    return plan_run(workload, HOURS_1M, calibration, load_cluster)


def test_a_plan_of_labelled_speech_alone_has_no_goal() -> None:
    """The paper's days are of untranscribed hours."""
    whole = planned_workload(1.0, 2.0)
    alone = replace(whole, subsets=tuple(s for s in whole.subsets if s.name == LABELLED))
    shown = format_plan(plan_run(alone, HOURS_1M, CALIBRATION, load_cluster), CALIBRATION)
    assert "train_baseline" in shown
    assert "goal" not in shown


def test_a_calibration_survives_its_file(tmp_path: Path) -> None:
    """Written as JSON, it reads back the same."""
    file = tmp_path / "calibration.json"
    file.write_text(json.dumps(asdict(CALIBRATION)))
    assert read_calibration(str(file)) == CALIBRATION


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


def test_what_a_calibration_lacks_is_published() -> None:
    """The one that comes with the package states what two cores gave, and nothing else."""
    found, published = read_calibration(TWO_CORES), read_published()
    assert (found.store, found.search, found.pool) == (
        published.store,
        published.search,
        published.pool,
    )
    assert found.devices.keys() == {*published.devices, HERE}


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

    def noting(config: Any, parameters: Any) -> Any:
        made.append(config.name)
        return make_optimizer(config, parameters)

    monkeypatch.setattr(measurement, "make_optimizer", noting)
    changed = replace(getattr(TINY, model), optimizer=SgdConfig())
    measure_device(replace(TINY, **{model: changed}), 1.0)
    assert made == (["sgd", "adam"] if model == "student" else ["adam", "sgd"])


def test_devices_without_a_figure_are_refused() -> None:
    """Neither measured nor published: the message says how to calibrate."""
    lone = replace(CALIBRATION, devices={})
    with pytest.raises(ConfigurationError, match=r"p3.16xlarge.*--calibrate-to"):
        plan(1_000.0, lone)


def test_training_frames_are_those_of_the_sub_epochs() -> None:
    """One pass over the unlabelled hours and 18 over the labelled; twelve epochs of the teacher."""
    workload = planned_workload(1e6, 7_000)
    frames_an_hour = training_frames(teacher_fit(HOURS_1M), workload) / 12 / 7_000
    assert frames_an_hour == pytest.approx(120_000, rel=0.02)
    student = training_frames(student_fit(HOURS_1M), workload)
    # The look-ahead repeats three frames of each utterance of 119.
    assert student == pytest.approx((1e6 + 18 * 7_000) * frames_an_hour * 1.025, rel=0.01)
    slow = replace(teacher_fit(HOURS_1M), augmentation=AugmentationConfig(speed=(0.5, 1.0)))
    slow_frames_an_hour = training_frames(slow, workload) / 12 / 7_000
    assert slow_frames_an_hour == pytest.approx(1.5 * frames_an_hour)


def test_a_million_hours_on_the_papers_clusters() -> None:
    """Lattices and sMBR add half a day to the paper's two days of the teacher, or less.

    The student takes the paper's four and a half or less.
    """
    steps = {step.step: step for step in plan(1e6).steps}
    assert list(steps) == PLANNED
    days = {name: step.wall_seconds / 86_400 for name, step in steps.items()}
    assert 1.0 < days["train_teacher"] < 2.5
    assert 1.5 < days["train_student"] < 4.5
    pipeline = [name for name in PLANNED if name not in BESIDE_THE_PIPELINE]
    assert sum(days[name] for name in pipeline) < 12
    assert plan(1e6).days == pytest.approx(sum(days[name] for name in pipeline))


def cluster(**changes: object) -> Cluster:
    """One instance of four cores that is no local process."""
    # Too few instances to exclude one of them.
    return replace(load_cluster("extract_features"), spark={}, **changes)


def test_what_a_step_waits_for() -> None:
    """Cores, S3's latency, the network or devices: whichever takes longest, by hand."""
    one = cluster(num_instances=1, executors_per_instance=1, cores_per_executor=4, devices=("cpu",))
    work = {"metadata_records_per_s": 30_000 * 40.0}  # 40 core-seconds
    busy = plan_part("s", Volume(tasks=8, work=work), one, CALIBRATION)
    assert (busy.bound, busy.core_seconds) == ("cores", 40.0)
    assert busy.wall_seconds == pytest.approx(6 + 10)
    gets = Requests(get=32_000)
    reads = Volume(tasks=4, requests=gets, small_reads=32_000, gets_in_flight=32)
    waiting = plan_part("s", reads, one, CALIBRATION)
    assert waiting.bound == "S3 latency"
    assert waiting.wall_seconds == pytest.approx(6 + 32_000 * 0.2 / 32 / 4)
    large = Volume(tasks=4, bytes_read=250e9, small_reads=1, requests=Requests(get=1))
    assert plan_part("s", large, one, CALIBRATION).wall_seconds == pytest.approx(6 + 1000)
    # Tasks reach a device through a pool, which gives them 0.95 of its speed.
    scored = ModelPass("teacher_forward", RATE.num_parameters, 95_000.0)
    devices = plan_part("s", Volume(tasks=4, passes=(scored,)), one, CALIBRATION)
    assert (devices.bound, devices.wall_seconds) == ("devices", pytest.approx(106.0))
    assert devices.instance_dollars == pytest.approx(0.796 * 106 / 3600)


def test_tasks_run_in_waves() -> None:
    """Five tasks on four cores take as long as eight."""
    one = cluster(num_instances=1, executors_per_instance=1, cores_per_executor=4)
    seconds = {}
    for tasks in (4, 5, 8):
        volume = Volume(tasks=tasks, work={"metadata_records_per_s": 30_000.0 * tasks})
        seconds[tasks] = plan_part("s", volume, one, CALIBRATION).wall_seconds
    assert seconds[4] == pytest.approx(7)
    assert seconds[5] == seconds[8] == pytest.approx(8)


SPEECH = planned_workload(1_000, 100, 3.6, dev_hours=2, heldout_hours=3)
SEARCH = CALIBRATION.search


def step_of(recipe: Recipe, step: str, workload: Workload = SPEECH) -> StepPlan:
    """A step's plan, on its own cluster, by a recipe."""
    steps = plan_run(workload, recipe, CALIBRATION, load_cluster).steps
    return next(each for each in steps if each.step == step)


def test_sequence_training_costs_lattices_and_epochs() -> None:
    """The search of all labelled speech, the network over it, and three epochs of sMBR."""
    without = replace(HOURS_1M, sequence_training=SequenceTrainingConfig())
    with_smbr = replace(HOURS_1M, sequence_training=SequenceTrainingConfig(student=True))
    before, after = (step_of(recipe, "train_student") for recipe in (without, with_smbr))
    fit = sequence_fit(with_smbr, student_fit(with_smbr))
    frames = training_frames(fit, SPEECH)
    assert frames == pytest.approx(3 * 100 * 120_000 * 1.01, rel=0.02)
    searched = 360_000 / SEARCH.lattices_x_real_time + frames / SEARCH.sequence_frames_per_s
    assert after.core_seconds - before.core_seconds == pytest.approx(searched)
    rate = CALIBRATION.devices["p3.16xlarge"].student_training
    frames_per_s = rate.of(num_parameters(HOURS_1M.models.student, 3_183))
    trained = frames / frames_per_s + frames / 3 / frames_per_s / 3
    assert after.device_seconds - before.device_seconds == pytest.approx(trained, rel=0.02)
    assert after.wall_seconds > before.wall_seconds + (trained + searched) / 64
    lattices = RAW_LATTICE_BYTES * 100 * 120_000
    assert after.volume.bytes_written > before.volume.bytes_written + lattices


def test_a_density_costs_more_time_and_fewer_bytes() -> None:
    """The paper's lattices of a model take around 6 GB for 7,000 hours (003 VII-C3)."""
    paper = planned_workload(1e6, 7_000)
    lattices, epochs = HOURS_1M.sequence_training.lattices, []
    for density in (0.0, 10.0):
        config = replace(HOURS_1M.sequence_training, lattices=replace(lattices, density=density))
        recipe = replace(HOURS_1M, sequence_training=config)
        epochs.append(step_of(recipe, "train_baseline", paper))
    raw, determinized = epochs
    searched = 7_000 * 3600 / SEARCH.lattices_x_real_time
    work = determinized.core_seconds - raw.core_seconds
    assert work == pytest.approx((DETERMINIZING_WORK - 1) * searched)
    saved = raw.volume.bytes_written - determinized.volume.bytes_written
    paper_bytes = RAW_LATTICE_BYTES * 7_000 * 120_000 - saved
    assert paper_bytes == pytest.approx(6e9, rel=0.15)


def test_each_round_of_realignment_costs_a_network_and_a_search() -> None:
    """Monophones learn from 20 of 100 hours; the last round alone aligns development speakers."""
    plain = replace(HOURS_1M, sequence_training=SequenceTrainingConfig())
    once, twice = (replace(plain, alignment=AlignmentConfig(rounds=n)) for n in (1, 2))
    forward = 100 * 120_000 / 3 / RATE.of(num_parameters(HOURS_1M.models.student, 3_183))
    a_round = 360_000 / SEARCH.alignment_x_real_time + forward
    realigned = [step_of(recipe, "realign").core_seconds for recipe in (once, twice)]
    assert realigned == pytest.approx([1.02 * a_round, 2.02 * a_round], rel=0.02)
    trained = [step_of(recipe, "train_aligner").device_seconds for recipe in (once, twice)]
    assert trained[1] == pytest.approx(2 * trained[0])
    baseline = step_of(once, "train_baseline")
    assert trained[0] == pytest.approx(baseline.device_seconds), "on as many ranks, by GTC"
    bootstrap = step_of(once, "bootstrap").core_seconds
    trained = 72_000 * HOURS_1M.bootstrap.num_iterations / 12 / SEARCH.bootstrap_x_real_time
    assert bootstrap == pytest.approx(trained + 360_000 / SEARCH.phones_x_real_time, rel=0.001)
    again = replace(HOURS_1M, alignment=AlignmentConfig(rounds=1, regrow_tree=True))
    plain, regrown = (step_of(recipe, "realign") for recipe in (once, again))
    assert regrown.core_seconds == pytest.approx(plain.core_seconds, rel=0.001)
    assert 1.9 < regrown.volume.bytes_read / plain.volume.bytes_read < 2.3


def test_tuning_decodes_at_as_many_settings_as_it_tries() -> None:
    """The start and each other value of the grid, for each model, sequence-trained ones too."""
    tried: list[DecodingSettings] = []

    def count(asked: Mapping[str, Sequence[DecodingSettings]]) -> dict[str, list[WordErrors]]:
        tried.extend(asked["student"])
        return {"student": [WordErrors(1, 0, 0, 2)] * len(asked["student"])}

    start = recipe_settings(HOURS_1M.evaluation)
    search(start, HOURS_1M.tuning.grid(), ["student"], count)
    assert num_tuned_settings(HOURS_1M) == len(tried) > 10
    with_arpa = replace(HOURS_1M, evaluation=replace(HOURS_1M.evaluation, arpa="own.arpa"))
    assert num_tuned_settings(with_arpa) == len(tried) - 2
    plain = replace(HOURS_1M, sequence_training=SequenceTrainingConfig())
    smbr = SequenceTrainingConfig(student=True)
    for recipe, models in ((plain, 3), (replace(plain, sequence_training=smbr), 4)):
        without = replace(recipe, tuning=TuningConfig((), (), (), ()))
        tuned, fixed = step_of(recipe, "evaluate"), step_of(without, "evaluate")
        decoded = 7_200 * models * (len(tried) - 1) / SEARCH.decoding_x_real_time
        assert tuned.core_seconds - fixed.core_seconds == pytest.approx(decoded)
    alone = planned_workload(1_000, 100)
    assert "evaluate" not in [
        each.step for each in plan_run(alone, plain, CALIBRATION, load_cluster).steps
    ]
