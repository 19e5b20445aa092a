"""Compare the device pool with a bare loop over the batches that the pool made.

python -m tests.benchmarks.device_pool.bare_loop --rounds 5
python -m tests.benchmarks.device_pool.bare_loop --devices cuda:0 --utterances 20000

In each round one task streams its utterances through one server, and then as many as there are
devices through as many; each time as many processes compute the same batches again in a bare loop,
without any server. The share is the bare loops' time by the pool's, from the first batch's
beginning to the last one's end. A GPU labels by the paper's teacher, in bfloat16 if it can.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from infra.devices.device_client import RequestFailure, RequestStream
from infra.devices.device_pool import DevicePool
from infra.devices.messages import PoolRequest
from tests.benchmarks.device_pool.workload import (
    BATCH_FRAMES,
    PAPERS_BATCH_FRAMES,
    RECORDED,
    Record,
    RecordedFunction,
    lengths,
    num_frames,
    read_payloads,
    utterances,
)
from tests.benchmarks.measure import Figure, show
from training.targets.teacher import encode_input

CLIENT = "from tests.benchmarks.device_pool.bare_loop import stream; stream()"
REPLAY = "from tests.benchmarks.device_pool.bare_loop import replay; replay()"


def stream() -> None:
    """Send a task's utterances through the pool that standard input describes."""
    asked = json.loads(sys.stdin.readline())
    every = list(map(encode_input, utterances(asked["count"])))
    pool = DevicePool(**{**asked["pool"], "devices": tuple(asked["pool"]["devices"])})
    label_all(pool, every[asked["task"] :: asked["num_tasks"]])


def label_file(pool: DevicePool, file: str) -> int:
    """Label a file's utterances; return how many there were."""
    return label_all(pool, read_payloads(Path(file)))


def label_all(pool: DevicePool, payloads: Sequence[bytes]) -> int:
    """Stream payloads through the pool as a task does."""
    requests = (PoolRequest(num_frames(each), each) for each in payloads)
    answers = list(RequestStream(pool).answers(requests))
    assert not [each for each in answers if isinstance(each, RequestFailure)]
    return len(answers)


def replay() -> None:
    """Compute the batches that standard input lists, once another line says so."""
    asked = json.loads(sys.stdin.readline())
    payloads = list(map(encode_input, utterances(asked["count"])))
    function = RecordedFunction(asked["name"], Path(asked["folder"]))
    function.check()
    print("ready", flush=True)
    sys.stdin.readline()
    for batch in asked["batches"]:
        function.label([payloads[number] for number in batch])


def pool_record(count: int, devices: Sequence[str], batch_frames: int = BATCH_FRAMES) -> Record:
    """Stream the utterances as one task a device."""
    num_devices = len(devices)
    with tempfile.TemporaryDirectory() as folder:
        pool = {
            "factory": RECORDED,
            "arguments": {"folder": folder},
            "devices": list(devices),
            "batch_frames": batch_frames,
            "idle_timeout_s": 2.0,
            "token": Path(folder).name,
        }
        asked = [
            {"pool": pool, "count": count, "task": task, "num_tasks": num_devices}
            for task in range(num_devices)
        ]
        with ThreadPoolExecutor() as threads:
            list(threads.map(partial(_run, CLIENT), asked))
        return Record.read(Path(folder))


def _run(program: str, asked: object) -> None:
    given = f"{json.dumps(asked)}\n"
    subprocess.run([sys.executable, "-c", program], input=given, text=True, check=True)


def bare_record(count: int, like: Record, devices: Sequence[str]) -> Record:
    """Compute the same batches, as many processes beside each other, which begin together."""
    with tempfile.TemporaryDirectory() as folder:
        processes = []
        for device, batches in zip(devices, like.batches.values(), strict=True):
            process = subprocess.Popen(
                [sys.executable, "-c", REPLAY],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            asked = {"name": device, "folder": folder, "count": count, "batches": batches}
            process.stdin.write(f"{json.dumps(asked)}\n")
            process.stdin.flush()
            processes.append(process)
        assert [process.stdout.readline() for process in processes] == ["ready\n"] * len(processes)
        for process in processes:
            process.stdin.write("\n")
            process.stdin.close()
        assert [process.wait() for process in processes] == [0] * len(processes)
        return Record.read(Path(folder))


def figures(num_rounds: int, count: int, every: Sequence[str], batch_frames: int) -> list[Figure]:
    """Return the shares, busy shares and frames a second, for one device and for all."""
    total = sum(lengths(count))
    found = []
    for devices in (every[:1], every) if len(every) > 1 else (every,):
        shares, busy, rates = [], [], []
        for _ in range(num_rounds):
            pool = pool_record(count, devices, batch_frames)
            shares.append(bare_record(count, pool, devices).makespan / pool.makespan)
            busy.append(pool.busy_share(len(devices)))
            rates.append(total / pool.makespan)
        name = " ".join(devices)
        found.append(Figure.of(f"{name}: share of a bare loop", shares, ""))
        found.append(Figure.of(f"{name}: busy share", busy, ""))
        found.append(Figure.of(f"{name}: pool", rates, "frames/s"))
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--utterances", type=int, default=300)
    parser.add_argument("--devices", nargs="+", default=["cpu#0", "cpu#1"])
    parser.add_argument("--batch-frames", type=int, help="default: 65,536 on a GPU, 4,096 on a CPU")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    is_gpu = arguments.devices[0].startswith("cuda")
    batch_frames = arguments.batch_frames or (PAPERS_BATCH_FRAMES if is_gpu else BATCH_FRAMES)
    found = figures(arguments.rounds, arguments.utterances, arguments.devices, batch_frames)
    show("The device pool and a bare loop over the same batches", found, arguments.json)


if __name__ == "__main__":
    main()
