"""Start the ranks of one method on their hosts, and wait for rank 0's results."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tests.benchmarks.slow_link.hosts import CARD, Host
from tests.benchmarks.slow_link.rank import Heat, Place, Point

REPOSITORY = Path(__file__).parents[3]
PORT = 29500  # each host is a network of its own: its ports are all free
POLL_S = 0.2


class RaceError(RuntimeError):
    """RaceError says that a rank failed or ran past the time limit, with the end of its log."""


def run_race(
    hosts: Sequence[Host], ranks_per_host: int, heats: Sequence[Heat], time_limit_s: float
) -> list[list[Point]]:
    """Return the points of each heat; the same processes train one after the other."""
    num_ranks = len(hosts) * ranks_per_host
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"rank-{rank}" for rank in range(num_ranks)]
        processes = []
        try:
            for rank, log in enumerate(logs):
                host = hosts[rank // ranks_per_host]
                place = Place(rank, num_ranks, ranks_per_host, host.address, hosts[0].address, PORT)
                processes.append(_start_rank(host, place, heats, log))
            _wait(processes, logs, time_limit_s)
            results = json.loads(logs[0].with_suffix(".out").read_text().splitlines()[-1])
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return [[Point(**point) for point in heat] for heat in results]


def _start_rank(
    host: Host, place: Place, heats: Sequence[Heat], log: Path
) -> "subprocess.Popen[bytes]":
    given = log.with_suffix(".in")
    given.write_text(json.dumps({"place": asdict(place), "heats": [asdict(h) for h in heats]}))
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": CARD, "OMP_NUM_THREADS": "1"}
    command = host.inside([sys.executable, "-m", "tests.benchmarks.slow_link.rank"])
    with given.open() as stdin, log.with_suffix(".out").open("w") as out, log.open("w") as err:
        return subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdin=stdin, stdout=out, stderr=err
        )


def _wait(
    processes: Sequence["subprocess.Popen[bytes]"], logs: Sequence[Path], time_limit_s: float
) -> None:
    """Return when all ranks have ended without an error."""
    deadline = time.monotonic() + time_limit_s
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed:
            raise RaceError(f"rank {failed[0]} failed:\n{_end_of(logs[failed[0]])}")
        if time.monotonic() > deadline:
            raise RaceError(
                f"no result within {time_limit_s:.0f} s; rank 0 says:\n{_end_of(logs[0])}"
            )
        time.sleep(POLL_S)


def _end_of(log: Path) -> str:
    return log.read_text()[-2000:]
