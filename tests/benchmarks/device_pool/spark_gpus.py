"""Compare the device pool with Spark's own scheduling of GPUs, on four devices that only wait.

python -m tests.benchmarks.device_pool.spark_gpus --rounds 3

A discovery script names four GPUs of one host. A device takes two seconds to load a model, and a
time by the padded frame for a batch, without any core; so four fit on two cores. Spark gives each
task a GPU (amount 1), or each two tasks one (amount 0.5); a task loads the model and computes its
batches itself. The pool's servers load it once.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from infra.cluster import load_cluster
from infra.devices.device_pool import DevicePool
from infra.devices.pool_folder import locked
from infra.spark.session import run_tasks, spark_session
from tests.benchmarks.device_pool.bare_loop import label_all
from tests.benchmarks.device_pool.workload import BATCH_FRAMES, Record, lengths
from tests.benchmarks.measure import Figure, show

NUM_GPUS = 4
NUM_TASKS = 24
LOAD_S = 2.0
FRAME_S = 2e-4
"""5,000 padded frames a second, as a device with a large model; small, to be over in a minute."""

SERVE = "tests.benchmarks.device_pool.spark_gpus:serve_waiting"


@dataclass(frozen=True)
class Waiting:
    """Waiting: a batch's lengths, and the numbers of its utterances."""

    lengths: tuple[int, ...]
    numbers: tuple[int, ...]


class WaitingFunction:
    """WaitingFunction waits as long as a device would compute; a device has one batch at a time."""

    def __init__(self, device: str, folder: Path) -> None:
        self._device, self._folder = device.replace(":", "-"), folder
        self._file = (folder / f"{self._device}-{os.getpid()}-{time.monotonic_ns()}.jsonl").open(
            "a"
        )
        with locked(folder / f"{self._device}.gpu", 600):
            time.sleep(LOAD_S)
        self._write("loaded", time.monotonic(), ())

    def _write(self, step: str, began: float, numbers: Sequence[int]) -> None:
        self._file.write(json.dumps([step, began, time.monotonic(), list(numbers)]) + "\n")
        self._file.flush()

    def prepare(self, payloads) -> Waiting:
        counts = [int.from_bytes(each[:8], "little") for each in payloads]
        return Waiting(
            tuple(count >> 32 for count in counts), tuple(count % 2**32 for count in counts)
        )

    def compute(self, prepared: Waiting) -> Waiting:
        with locked(self._folder / f"{self._device}.gpu", 600):
            began = time.monotonic()
            time.sleep(FRAME_S * len(prepared.lengths) * max(prepared.lengths))
            self._write("compute", began, prepared.numbers)
        return prepared

    def finish(self, computed: Waiting) -> list[bytes]:
        return [bytes(8 * length) for length in computed.lengths]

    def check(self) -> None:
        """Wait for nothing."""


def serve_waiting(device: str, folder: str) -> WaitingFunction:
    """Make a device server's function."""
    return WaitingFunction(device, Path(folder))


def payload(number: int, length: int) -> bytes:
    """Return an utterance that says its length and number alone, of a float's size a frame."""
    return (length << 32 | number).to_bytes(8, "little") + bytes(768 * length)


def label_alone(folder: str, task: Sequence[tuple[int, int]], rows: int = 8) -> int:
    """Label a task's utterances on the GPU that Spark assigns, `rows` of them at a time."""
    from pyspark import TaskContext  # noqa: PLC0415 - in the worker

    (address,) = TaskContext.get().resources()["gpu"].addresses
    function = WaitingFunction(f"cuda:{address}", Path(folder))
    for first in range(0, len(task), rows):
        batch = [payload(*each) for each in task[first : first + rows]]
        function.finish(function.compute(function.prepare(batch)))
    return len(task)


def label_by_pool(pool: DevicePool, task: Sequence[tuple[int, int]]) -> int:
    """Stream a task's utterances to the pool."""
    return label_all(pool, [payload(*each) for each in task])


def measure(amount: str | None, tasks: Sequence[Sequence[tuple[int, int]]]) -> Record:
    """Label all tasks with GPUs of Spark's, `amount` a task, or by the pool's four servers."""
    with tempfile.TemporaryDirectory() as folder:
        label: Callable[[Sequence[tuple[int, int]]], int] = partial(label_alone, folder)
        settings = {"spark.executorEnv.PYTHONPATH": str(Path(__file__).parents[3])}
        if amount is None:
            devices = tuple(f"cuda:{number}" for number in range(NUM_GPUS))
            pool = DevicePool(SERVE, {"folder": folder}, devices, BATCH_FRAMES, idle_timeout_s=3.0)
            label = partial(label_by_pool, pool)
        else:
            settings |= _gpus(amount, Path(folder))
        demo = load_cluster("demo")
        cluster = replace(
            demo,
            master="local-cluster[1,8,2048]",
            cores_per_executor=8,
            executor_memory="2g",
            spark=demo.spark | settings,
        )
        with spark_session("gpus", cluster) as session:
            run_tasks(session, tasks, label, "labels")
        return Record.read(Path(folder))


def _gpus(amount: str, folder: Path) -> dict[str, str]:
    script = folder / "gpus.sh"
    addresses = json.dumps([str(number) for number in range(NUM_GPUS)])
    script.write_text(f"""#!/bin/sh\necho '{{"name": "gpu", "addresses": {addresses}}}'\n""")
    script.chmod(0o700)
    return {
        "spark.worker.resource.gpu.amount": str(NUM_GPUS),
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": str(NUM_GPUS),
        "spark.task.resource.gpu.amount": amount,
    }


def figures(num_rounds: int, count: int) -> list[Figure]:
    """Return makespan over ideal, busy shares and loads of the three."""
    every = list(enumerate(lengths(count)))
    tasks = [every[number::NUM_TASKS] for number in range(NUM_TASKS)]
    ideal = FRAME_S * sum(length for _, length in every) / NUM_GPUS
    found = []
    for name, amount in {"pool": None, "Spark, 1 GPU a task": "1", "Spark, 0.5": "0.5"}.items():
        records = [measure(amount, tasks) for _ in range(num_rounds)]
        waits = [each.makespan / ideal for each in records]
        found.append(Figure.of(f"{name}: makespan / (frames / devices)", waits, ""))
        busy = [each.busy_share(NUM_GPUS) for each in records]
        found.append(Figure.of(f"{name}: busy share", busy, ""))
        loads = [float(each.num_loads) for each in records]
        found.append(Figure.of(f"{name}: model loads", loads, ""))
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--utterances", type=int, default=1200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = figures(arguments.rounds, arguments.utterances)
    show("Four devices behind a pool, and as Spark assigns them", found, arguments.json)


if __name__ == "__main__":
    main()
