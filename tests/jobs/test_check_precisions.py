"""A model of the user's own is tried in every precision that a run would ask of it."""

from pathlib import Path

import pytest

from tests.job_programs import RunJob, Said
from tests.whole_path.processes import TINY

DEMO_CLUSTER = Path(__file__).parents[2] / "infra" / "clusters" / "demo.toml"
OWN = (
    '{name = "factory", factory = "tests.training.models.own_models:Float32Alone", look_ahead = 0}'
)


def check(run_job: RunJob, section: str, *settings: str) -> Said:
    options = [part for each in (f"models.{section}={OWN}", *settings) for part in ("--set", each)]
    return run_job("check", "--recipe", str(TINY), "--run", "runs/x", *options)


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        ("student", ["sequence_training.student=true", "sequence_training.precision=bfloat16"]),
        ("teacher", ["targets.rounds=2", "student.precision=bfloat16"]),
        ("teacher", ["teacher.precision=bfloat16"]),
    ],
)
def test_a_model_of_float32_alone_is_refused(
    run_job: RunJob, section: str, settings: list[str]
) -> None:
    """It trains in float32; sMBR, a later round or a GPU's labels in bfloat16 would fail."""
    assert check(run_job, section, *settings[:-1]).code == 0
    said = check(run_job, section, *settings)
    assert said.code == 2
    assert f"models: {section}: " in said.err
    assert "in bfloat16: RuntimeError: expected m1 and m2 to have the same dtype" in said.err


@pytest.mark.parametrize(
    ("instance", "section", "is_well"),
    [
        ("g5.48xlarge", "teacher", False),
        ("g5.48xlarge", "student", True),
        ("p3.16xlarge", "teacher", True),
    ],
)
def test_a_teacher_that_gpus_ask_is_tried_in_bfloat16(
    run_job: RunJob, tmp_path: Path, instance: str, section: str, is_well: bool
) -> None:
    """A10Gs label in it, and V100s in float32; the student's form labels nothing."""
    gpus = tmp_path / "gpus.toml"
    gpus.write_text(
        DEMO_CLUSTER.read_text()
        .replace('"local[2]"', '"yarn"')
        .replace('instance_type = "local"', f'instance_type = "{instance}"')
        .replace('["cpu#0", "cpu#1"]', '"auto"')
    )
    said = check(run_job, section, f'cluster="{gpus}"')
    assert (said.code == 0) is is_well, said
    assert is_well or f"models: {section}: frames" in said.err
