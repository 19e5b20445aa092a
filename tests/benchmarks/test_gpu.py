"""The GPU benchmarks run small on a CPU, with interpreted kernels."""

import pytest
import torch

from tests.benchmarks import gpu, gpu_messages, gpu_student
from tests.benchmarks.gtc_task import GtcTask
from tests.training.algorithms.gtc import interpreted
from training.algorithms.gtc.encoding import take_message
from training.models.acoustic_model import ModelConfig

CPU = torch.device("cpu")
SMALL = gpu_student.Shape(ModelConfig(2, 8, False, 3, 0.0), 30, 4, 6, 5)
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


def test_a_step_trains_the_student() -> None:
    """The loss falls; in bf16 it is nearly that in fp32."""
    steps = [
        gpu_student.training_step(SMALL, CPU, dtype) for dtype in (torch.float32, torch.bfloat16)
    ]
    losses = torch.tensor([[float(step()) for _ in range(8)] for step in steps])
    assert torch.all(losses.diff() < 0)
    torch.testing.assert_close(losses[0], losses[1], rtol=0.01, atol=0)


def test_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every kind of step has a speed."""
    monkeypatch.setattr(gpu_student, "STEPS", 1)
    found = gpu_student.figures(SMALL, CPU, 1)
    assert [figure.unit for figure in found] == ["frames/s"] * 3 + ["x"] * 2
    assert all(figure.median > 0 for figure in found)
