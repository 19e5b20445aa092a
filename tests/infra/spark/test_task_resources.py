import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from infra.cluster import load_cluster
from infra.spark import task_resources as finding
from infra.spark.session import run_tasks, spark_session
from infra.spark.task_resources import task_devices

CORES = tuple(f"cpu#{number}" for number in range(len(os.sched_getaffinity(0))))


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder in which a host's GPUs would be."""
    monkeypatch.setattr(finding, "_DEVICE_NODES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("present", "listed", "found"),
    [
        ((), None, CORES),
        (("nvidiactl", "nvidia-uvm", "nvidia-caps"), None, CORES),
        (("nvidiactl", "nvidia0", "nvidia10"), None, ("cuda:0", "cuda:1")),
        (("nvidia3",), None, ("cuda:0",)),
        (("nvidia0", "nvidia1", "nvidia2"), "2, 0", ("cuda:0", "cuda:1")),
        (("nvidia0", "nvidia1"), "GPU-8932f937,-1,0", ("cuda:0",)),
        (("nvidia0",), "", CORES),
        (("nvidia0",), "-1", CORES),
        ((), "0", CORES),
    ],
)
def test_auto_are_the_gpus_that_cuda_shows(
    nodes: Path,
    monkeypatch: pytest.MonkeyPatch,
    present: tuple[str, ...],
    listed: str | None,
    found: tuple[str, ...],
) -> None:
    """torch counts them from 0, whatever their numbers are; without any the cores are devices."""
    for name in present:
        (nodes / name).touch()
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert task_devices("auto") == found


def test_named_devices_are_taken_as_they_are(nodes: Path) -> None:
    """Whatever the host has: a name that it has not fails when its server starts."""
    (nodes / "nvidia0").touch()
    assert task_devices(("cuda:7", "cpu#1")) == ("cuda:7", "cpu#1")


@pytest.mark.cluster
def test_tasks_have_the_gpus_that_spark_assigns(tmp_path: Path) -> None:
    """Two tasks at a time on a host of two GPUs have one each, by its number among the visible."""
    script = tmp_path / "gpus.sh"
    script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["4", "6"]}'\n""")
    script.chmod(0o700)
    settings = {
        "spark.worker.resource.gpu.amount": "2",
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": "2",
        "spark.task.resource.gpu.amount": "1",
        "spark.executorEnv.CUDA_VISIBLE_DEVICES": "6,4",
        "spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[3]),
    }
    demo = load_cluster("demo")
    cluster = replace(
        demo,
        master="local-cluster[1,2,1024]",
        cores_per_executor=2,
        executor_memory="1g",
        spark=demo.spark | settings,
    )

    def nap(seconds: float) -> tuple[str, ...]:
        time.sleep(seconds)
        return task_devices(("cpu",))

    with spark_session("devices", cluster) as session:
        found = run_tasks(session, [1.0] * 4, nap, "naps")
    assert set(found) == {("cuda:0",), ("cuda:1",)}


def test_an_invisible_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the address and what CUDA shows."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,4")
    with pytest.raises(ValueError, match="GPU '5': need one of CUDA_VISIBLE_DEVICES: 6, 4"):
        finding._cuda_device("5")
