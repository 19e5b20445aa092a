"""Compare the device pool with Ray Data, Spark's predict_batch_udf and Daft on one teacher.

python -m tests.benchmarks.device_pool.peers --ray PYTHON --pandas PYTHON --daft PYTHON --rounds 3

Each PYTHON is an environment that has the peer (`ray[data]`; pandas for Spark's; daft), and this
project's dependencies. All read the same eight files of utterances of skewed lengths and label them
by the same model on two workers of one thread. Peers give a worker `--rows` utterances at a time.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tests.benchmarks.device_pool.workload import Record, num_frames, read_payloads, write_files
from tests.benchmarks.measure import Figure, show

NUM_FILES = 8
NUM_WORKERS = 2
OWN = "pool_on_spark"
PEERS = {"ray": "ray_data", "pandas": "spark_udf", "daft": "daft_udf"}
"""The modules of the peers, by the option that names their environment."""


def measure(python: str, module: str, files: Path, rows: int) -> tuple[Record, dict[str, float]]:
    """Run one harness once; return what its workers recorded, and its seconds."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", f"tests.benchmarks.device_pool.{module}"]
        started = time.monotonic()
        subprocess.run([*command, str(files), folder, str(rows)], check=True)
        ended, record = time.monotonic(), Record.read(Path(folder))
    return record, {
        "whole program": ended - started,
        "to the first target": record.first_target - started,
        "makespan": record.makespan,
    }


def figures(pythons: Mapping[str, str], num_rounds: int, count: int, rows: int) -> list[Figure]:
    """Return each harness's figures, which take turns."""
    found: dict[str, dict[str, list[float]]] = {module: {} for module in pythons}
    with tempfile.TemporaryDirectory() as files:
        written = write_files(Path(files), count, NUM_FILES)
        total = sum(num_frames(each) for file in written for each in read_payloads(file))
        for _ in range(num_rounds):
            for module, python in pythons.items():
                record, seconds = measure(python, module, Path(files), rows)
                assert sum(map(len, _computed(record))) == count, f"{module} lost utterances"
                facts = {
                    "throughput, frames/s": total / record.makespan,
                    "busy share": record.busy_share(NUM_WORKERS),
                    "model loads": float(record.num_loads),
                    **{f"{name}, s": value for name, value in seconds.items()},
                }
                for name, value in facts.items():
                    found[module].setdefault(name, []).append(value)
    return [
        Figure.of(f"{module}: {name}", values, "")
        for module, facts in found.items()
        for name, values in facts.items()
    ]


def _computed(record: Record) -> list[tuple[int, ...]]:
    return [batch for batches in record.batches.values() for batch in batches]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in PEERS:
        parser.add_argument(f"--{option}", metavar="PYTHON")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--utterances", type=int, default=400)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    given = {module: getattr(arguments, option) for option, module in PEERS.items()}
    pythons = {OWN: sys.executable, **{name: each for name, each in given.items() if each}}
    sizes = arguments.rounds, arguments.utterances, arguments.rows
    show("Labelling by two workers", figures(pythons, *sizes), arguments.json)


if __name__ == "__main__":
    main()
