"""Planned costs of an ensemble of teachers, and of targets at all offsets."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.cluster import Cluster, load_cluster
from jobs.planning.run_plan import RunPlan, StepPlan, plan_run, planned_workload
from tests.jobs.planning.test_throughputs import CALIBRATION
from training.settings.recipe import read_recipe

RECIPE = Path(__file__).parents[3] / "jobs" / "recipes" / "hours_1m.toml"


def planned(*overrides: str, **clusters: Cluster) -> dict[str, StepPlan]:
    recipe = read_recipe(str(RECIPE), overrides)
    workload = planned_workload(1e4, 70)
    plan: RunPlan = plan_run(
        workload, recipe, CALIBRATION, lambda step: clusters.get(step) or load_cluster(step)
    )
    return {step.step: step for step in plan.steps}


def test_all_offsets_cost_three_times_the_labelling() -> None:
    """Teacher, selection and target bytes thrice; partitions a third more; nothing else changes."""
    one, every = planned(), planned("targets.offsets=all")
    labelled, more = one["generate_targets"], every["generate_targets"]
    assert more.device_seconds == pytest.approx(3 * labelled.device_seconds)
    assert more.volume.bytes_written == pytest.approx(3 * labelled.volume.bytes_written, rel=0.01)
    assert more.volume.bytes_read == labelled.volume.bytes_read
    assert more.volume.requests == labelled.volume.requests
    kept = one["repartition"].volume.bytes_written, every["repartition"].volume.bytes_written
    assert kept[1] / kept[0] == pytest.approx((384 + 3 * 82) / (384 + 82), rel=0.02)
    student = one["train_student"], every["train_student"]
    assert student[0].device_seconds == student[1].device_seconds
    # The paper's recipe makes one pass over the partitions.
    more_read = student[1].volume.bytes_read - student[0].volume.bytes_read
    assert more_read == pytest.approx(kept[1] - kept[0], rel=1e-3)
    for step in one.keys() - {"generate_targets", "repartition", "train_student"}:
        assert one[step] == every[step]


@pytest.mark.parametrize(
    "settings", [(), ("sequence_training.teacher=true",), ("targets.rounds=2",)]
)
def test_an_ensemble_costs_a_teacher_a_member(settings: tuple[str, ...]) -> None:
    """Its trainings follow one another, also by sMBR and in later rounds; each member labels."""
    one, three = planned(*settings), planned(*settings, "teacher.ensemble=3")
    trained = one["train_teacher"], three["train_teacher"]
    assert trained[1].device_seconds == pytest.approx(3 * trained[0].device_seconds)
    assert trained[1].volume.bytes_written == pytest.approx(3 * trained[0].volume.bytes_written)
    labelled = one["generate_targets"], three["generate_targets"]
    assert labelled[1].device_seconds == pytest.approx(3 * labelled[0].device_seconds)
    assert labelled[1].volume.bytes_written == labelled[0].volume.bytes_written
    assert one["train_student"] == three["train_student"]


def test_cores_select_the_k_best_unless_a_gpu_does() -> None:
    """A GPU selects its k best itself, and draws no tail; an ensemble's are selected once."""
    of_cpus = replace(load_cluster("generate_targets"), devices=("cpu#0", "cpu#1"))
    one, three = (
        planned(f"teacher.ensemble={members}", generate_targets=of_cpus)["generate_targets"]
        for members in (1, 3)
    )
    assert "kbest_logits_per_s" not in planned()["generate_targets"].volume.work
    drawn = planned("targets.tail_samples=4")["generate_targets"]
    logits = 1e4 * 120_000 * 3_183
    for each in (one, three, drawn):
        assert each.volume.work["kbest_logits_per_s"] == logits
    assert three.device_seconds == pytest.approx(3 * one.device_seconds)
