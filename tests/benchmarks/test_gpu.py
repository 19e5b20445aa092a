"""The GPU benchmarks run small on a CPU, with interpreted kernels."""

import json
from pathlib import Path

import pytest
import torch

from tests.benchmarks import gpu, gpu_job_step, gpu_messages
from tests.benchmarks.gtc_task import GtcTask
from tests.benchmarks.reader import read_all
from tests.training.algorithms.gtc import interpreted
from training.algorithms.gtc.encoding import take_message
from training.distributed import process_group
from training.settings.model_training import Precision

pytestmark = pytest.mark.chaos

CPU = torch.device("cpu")
assert interpreted


def test_refuses_to_run_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message names what is missing, and the exit code is that of bad usage."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        gpu.main([])
    assert refused.value.code == 2
    assert "sees no CUDA device" in capsys.readouterr().err


def test_tasks_stay_equally_dense() -> None:
    """Step after step about the same share of the elements is sent."""
    task = GtcTask.of(50_000, 0.01, CPU)
    for _ in range(5):
        message = take_message(task.residual, task.gradients, task.gradient_threshold)
        assert 350 < int(message[1]) < 650


def test_messages_are_checked_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every figure is there, for sparse and for dense messages."""
    monkeypatch.setattr(gpu_messages, "DENSITIES", (0.01, 0.3))
    monkeypatch.setattr(gpu_messages, "REPEATS", 1)
    names = [figure.name for figure in gpu_messages.figures(9000, CPU, 1)]
    assert len(names) == 2 * 3 * 2
    assert "density 0.3: encode, share of copy" in names


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


@pytest.mark.parametrize("precision", gpu_job_step.PRECISIONS)
def test_bare_and_job_steps_train(tmp_path: Path, precision: Precision) -> None:
    """The bare loop's loss falls; a job's steps have all frames of its partitions."""
    step = gpu_job_step.bare_step(gpu.SMALL, CPU, precision, has_graphs=False)
    losses = [float(step()) for _ in range(8)]
    assert losses == sorted(losses, reverse=True)
    dataset = gpu.SMALL.dataset(str(tmp_path))
    with process_group.open_world() as group:
        bench = gpu_job_step.Bench(gpu.SMALL, dataset, CPU, group)
        steps = bench.job_steps(gpu_job_step.TRAINERS[0], precision, has_graphs=True)
        assert sum(steps) == read_all(dataset, gpu_job_step.SOFT_CHUNKS)
