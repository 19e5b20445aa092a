"""Planned costs of an ensemble of teachers, and of targets at all offsets."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.cluster import Cluster, load_cluster
from jobs.planning.run_plan import RunPlan, StepPlan, plan_run
from jobs.planning.volumes import partition_bytes, target_bytes
from jobs.planning.workload import planned_workload
from pipeline.shards import (
    KBestAtAllOffsets,
    PartitionRow,
    TargetRow,
    write_partition,
    write_targets,
)
from tests.jobs.planning.test_throughputs import CALIBRATION
from tests.training.data.partition_rows import row_at_all_offsets
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
    assert labelled[1].volume == labelled[0].volume
    assert one["train_student"] == three["train_student"]


def test_a_core_selects_after_its_forward_pass_and_beside_a_gpus() -> None:
    """A GPU selects the k best itself, a core a drawn tail beside it; an ensemble's once."""
    of_cpus = replace(load_cluster("generate_targets"), devices=("cpu#0", "cpu#1"))
    one, three = (
        planned(f"teacher.ensemble={members}", generate_targets=of_cpus)["generate_targets"]
        for members in (1, 3)
    )
    selecting = one.volume.work.kbest_logits / CALIBRATION.core.kbest_logits_per_s
    forward = planned()["generate_targets"].device_seconds
    assert one.device_seconds == pytest.approx(forward + selecting)
    assert three.device_seconds == pytest.approx(3 * forward + selecting)
    for name, seconds in {"generate_targets": forward, "generate_targets_h100": selecting}.items():
        drawn = planned("targets.tail_samples=4", generate_targets=load_cluster(name))
        assert drawn["generate_targets"].device_seconds == pytest.approx(seconds)
    assert planned()["generate_targets"].volume.work.kbest_logits == 0


def test_bytes_at_all_offsets_are_those_of_shards() -> None:
    """Within 5 % of what is written for utterances of 4 to 13 s."""
    rows: list[PartitionRow] = [row_at_all_offsets(n, 400 + 37 * n) for n in range(25)]
    hours = sum(len(row.features) + 2 for row in rows) / 360_000
    targets = []
    for row in rows:
        assert isinstance(row.targets, KBestAtAllOffsets)
        targets.append(TargetRow(row.utterance_id, row.offset, row.targets))
    counts = hours, len(rows), 1
    written = len(write_targets(targets)), len(write_partition(rows))
    assert target_bytes(*counts, 4, "all") == pytest.approx(written[0], rel=0.05)
    assert partition_bytes(*counts, 4, "float16", "all") == pytest.approx(written[1], rel=0.05)
