"""The device of a rank: a function of --device, the ranks of the host and its GPUs."""

from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch

from infra.settings import ConfigurationError
from jobs.cli.arguments import add_device_argument
from jobs.cli.host import Gpus, choose_device, gpus_for
from jobs.run import launches
from jobs.run_table import STEPS
from tests.job_programs import RunJob
from tests.whole_path.processes import TINY

WITH_DEVICE = [name for name, step in STEPS.items() if step.has_device]


@pytest.mark.parametrize(
    ("choice", "local_rank", "num_local_ranks", "num_gpus", "device"),
    [
        ("auto", 0, 1, 0, "cpu"),
        ("auto", 3, 4, 0, "cpu"),  # a host without GPUs has a CPU for any number of ranks
        ("auto", 0, 4, 4, "cuda:0"),
        ("auto", 3, 4, 4, "cuda:3"),
        ("auto", 1, 2, 8, "cuda:1"),
        ("cpu", 1, 2, 8, "cpu"),
        ("cpu", 7, 8, 1, "cpu"),
        ("cuda", 2, 3, 3, "cuda:2"),
        ("cuda:0", 0, 1, 1, "cuda:0"),
        ("cuda:7", 0, 1, 8, "cuda:7"),
    ],
)
def test_a_rank_has_a_gpu_of_its_own_or_the_cpu(
    choice: str, local_rank: int, num_local_ranks: int, num_gpus: int, device: str
) -> None:
    """Rank r of a host has its GPU r, unless --device says otherwise."""
    gpus = Gpus(num_gpus, is_built=True)
    assert str(choose_device(choice, local_rank, num_local_ranks, gpus)) == device


@pytest.mark.parametrize(
    ("choice", "num_local_ranks", "gpus", "message"),
    [
        ("auto", 4, Gpus(3, True), r"--device auto: 4 ranks on this host: need at most 3, one for"),
        ("cuda", 2, Gpus(1, True), r"--device cuda: 2 ranks .* at most 1, .* give --device cpu$"),
        ("cuda:0", 2, Gpus(2, True), r"--device cuda:0: 2 ranks .* at most 1, or --device cuda, "),
        ("cuda:2", 1, Gpus(2, True), r"--device cuda:2: need at most cuda:1, the last of 2 GPUs"),
        ("cuda", 1, Gpus(0, True), r"--device cuda: need a GPU, found none: see that nvidia-smi"),
        ("cuda:0", 1, Gpus(0, False), r"found none: install a CUDA build of torch, as 2\.\d+\.\d+"),
    ],
)
def test_an_absent_gpu_is_one_sentence(
    choice: str, num_local_ranks: int, gpus: Gpus, message: str
) -> None:
    """It names the choice, the bound and the remedy, on the rank that would have one, too."""
    with pytest.raises(ConfigurationError, match=message) as found:
        choose_device(choice, 0, num_local_ranks, gpus)
    assert "\n" not in str(found.value)
    assert "--device cpu" in str(found.value)


def test_gpus_are_counted_for_choices_that_need_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch, unless the CPU is asked for or the host has no file of a GPU."""
    many = Gpus(9, is_built=True)
    monkeypatch.setattr(Gpus, "of_host", lambda: many)
    has_files = bool([*Path("/dev").glob("nvidia*"), *Path("/dev").glob("kfd")])
    assert gpus_for("cpu") == Gpus(0, is_built=False)
    assert gpus_for("auto") == (many if has_files else Gpus(0, is_built=False))
    assert gpus_for("cuda") == gpus_for("cuda:1") == many


@pytest.mark.parametrize("choice", ["gpu", "cuda:", "cuda:-1", "cuda:a", "cpu:0", "CPU", ""])
def test_other_devices_are_bad_usage(choice: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The message names the value and all that is known."""
    parser = ArgumentParser()
    add_device_argument(parser)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args([f"--device={choice}"])
    assert ended.value.code == 2
    assert f"--device: {choice}: need auto, cpu, cuda, or a GPU by its" in capsys.readouterr().err


@pytest.mark.parametrize("step", WITH_DEVICE)
def test_steps_with_a_model_take_a_device(run_job: RunJob, tmp_path: Path, step: str) -> None:
    """Their --help explains it; a GPU that is absent is bad usage, before anything is read."""
    said = run_job(step, "--help")
    assert said.code == 0
    assert "--device DEVICE" in said.out
    assert "default auto" in said.out
    if torch.cuda.is_available():
        return
    options = ("--recipe", str(TINY), "--run", str(tmp_path), "--device")
    said = run_job(step, *options, "cuda:0")
    assert (said.code, said.out) == (2, "")
    assert said.err.splitlines()[-1].startswith(
        f"{step}: --device cuda:0: need a GPU, found none: "
    )
    said = run_job(step, *options, "tpu")
    assert said.code == 2
    assert "argument --device: tpu: need auto, cpu, cuda, or a GPU" in said.err


def test_a_run_gives_its_device_to_these_steps_alone() -> None:
    """Spark's steps share the devices that their cluster file names."""
    given = {
        each.step
        for each in launches(["--kaldi-dir", "data"], 2, 4, "cuda")
        if "cuda" in each.arguments
    }
    assert given == set(WITH_DEVICE)
