"""The GPU benchmarks run small on a CPU, with interpreted kernels."""

import json

import pytest

from tests.benchmarks import gpu, gpu_job_step, gpu_messages
from tests.training.algorithms.gtc import interpreted

pytestmark = pytest.mark.chaos

assert interpreted


def test_every_step_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one command, on small sizes: each trainer and precision beside its goals."""
    monkeypatch.setattr(gpu_messages, "DENSITIES", (0.01,))
    monkeypatch.setattr(gpu_messages, "REPEATS", 1)
    gpu.main(["--device", "cpu", "--rounds", "1", "--json"])
    found = json.loads(capsys.readouterr().out)["figures"]
    medians = {figure["name"]: figure["median"] for figure in found}
    assert all(value > 0 for value in medians.values())
    # The messages', the reader's, and of each precision a bare loop and three trainers twice.
    assert len(medians) == 6 + 1 + 3 * (1 + 3 * 2)
    speed = medians[f"bfloat16, gtc, no graphs ({gpu_job_step.GOAL_SPEEDS})"]
    share = medians[f"bfloat16, gtc, no graphs, of the best bare loop ({gpu_job_step.GOALS})"]
    assert share == pytest.approx(speed / medians["bfloat16, bare, no graphs"])
