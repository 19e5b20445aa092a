"""Run a real Spark standalone cluster on loopback for tests: a master and workers.

Each worker has its own address (127.0.0.2, ...), because Spark runs no speculative attempt on the
host of the first one. All processes are killed at the end.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pyspark

from infra.spark.session import spark_environment
from tests.s3_server import free_port

SPARK_HOME = Path(pyspark.__file__).parent
START_LIMIT_S = 300.0
MARK = "MEGAHOUR_TEST_CLUSTER"
# Java's second compiler does not pay in such short lives; nor do many collector threads.
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

Process = subprocess.Popen[bytes]


@dataclass
class StandaloneCluster:
    """StandaloneCluster is a running cluster; its processes inherit a mark in their environment."""

    folder: Path
    num_workers: int
    cores_per_worker: int
    environment: dict[str, str]
    port: int = field(default_factory=free_port)
    web_port: int = field(default_factory=free_port)
    _master: Process | None = None
    _workers: dict[int, Process] = field(default_factory=dict)

    @property
    def master_url(self) -> str:
        """Return the URL for spark-submit's --master."""
        return f"spark://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the master and all workers; wait until they know each other."""
        address = ("--host", "127.0.0.1", "--port", str(self.port))
        ui = ("--webui-port", str(self.web_port))
        # An application must not end because many of its executors were killed.
        settings = {"SPARK_MASTER_OPTS": "-Dspark.deploy.maxExecutorRetries=-1"}
        self._master = self._spawn("master.Master", "master", settings, *address, *ui)
        self._wait_for(lambda: self._num_alive() is not None, "the master did not start")
        self.restart_dead_workers()
        enough = f"fewer than {self.num_workers} workers registered"
        self._wait_for(lambda: self._num_alive() == self.num_workers, enough)

    def restart_dead_workers(self) -> int:
        """Start each worker that does not run; return how many there were."""
        dead = [
            number
            for number in range(1, self.num_workers + 1)
            if number not in self._workers or self._workers[number].poll() is not None
        ]
        for number in dead:
            host = f"127.0.0.{number + 1}"
            work = str(self.folder / f"worker-{number}")
            self._workers[number] = self._spawn(
                "worker.Worker",
                f"worker-{number}",
                {"SPARK_LOCAL_IP": host},
                *("--host", host, "--webui-port", "0", "--work-dir", work),
                *("--cores", str(self.cores_per_worker), "--memory", "2g"),
                self.master_url,
            )
        return len(dead)

    def processes(self) -> dict[int, str]:
        """Return the command line of every process that bears the mark, by process id."""
        return marked_processes(self.environment[MARK])

    def stop(self) -> None:
        """Kill all processes that bear the mark, until there are none."""
        deadline = time.monotonic() + START_LIMIT_S
        while alive := self.processes():
            if time.monotonic() > deadline:
                raise RuntimeError(f"still alive after {START_LIMIT_S:g} s of SIGKILL: {alive}")
            for process_id in alive:
                with suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
            for child in (self._master, *self._workers.values()):
                if child is not None:
                    child.poll()
            time.sleep(0.05)

    def _spawn(self, part: str, name: str, settings: Mapping[str, str], *arguments: str) -> Process:
        command = [str(SPARK_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{part}"]
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [*command, *arguments],
                cwd=self.folder,
                env={**self.environment, **settings},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _num_alive(self) -> int | None:
        try:
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self.web_port}/json/", timeout=5
            ) as page:
                workers = json.load(page)["workers"]
        except (OSError, ValueError):
            return None
        return sum(worker["state"] == "ALIVE" for worker in workers)

    def _wait_for(self, condition: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while not condition():
            ended = self._master is not None and self._master.poll() is not None
            if ended or time.monotonic() > deadline:
                logs = f"within {START_LIMIT_S:g} s; logs in {self.folder}"
                raise RuntimeError(f"{problem} {logs}: {last_lines(self.folder / 'master.log')}")
            time.sleep(0.1)


@contextmanager
def running_cluster(
    folder: Path,
    num_workers: int = 2,
    cores_per_worker: int = 2,
    settings: Mapping[str, str] | None = None,
) -> Iterator[StandaloneCluster]:
    """Run a cluster that works in `folder`; `settings` are added to every process's environment."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **spark_environment(),
        **(settings or {}),
        MARK: uuid.uuid4().hex,
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_CONF_DIR": str(folder / "conf"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(folder / "local"),
        "SPARK_LOG_DIR": str(folder),
        "SPARK_DAEMON_MEMORY": "256m",
        # Without this Spark takes the next port where one is taken, perhaps another program's.
        # The REST server's port is the same for every master, and no test uses it.
        "SPARK_DAEMON_JAVA_OPTS": f"{JAVA_OPTIONS} -Dspark.port.maxRetries=0 "
        "-Dspark.master.rest.enabled=false",
        "SPARK_SUBMIT_OPTS": JAVA_OPTIONS,
        "OPENBLAS_NUM_THREADS": "2",  # steps and their executors set one
    }
    # Each executor unpacks its dependencies; its Python workers share the compiled bytecode.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "infra.spark.session"]
    subprocess.run(command, env=environment, check=True, timeout=START_LIMIT_S, capture_output=True)
    cluster = StandaloneCluster(folder, num_workers, cores_per_worker, environment)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def marked_processes(mark: str) -> dict[int, str]:
    """Return command lines of the processes whose environment holds `mark`, by process id."""
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            if mark.encode() in (process / "environ").read_bytes():
                words = (process / "cmdline").read_bytes().split(b"\0")
                found[int(process.name)] = b" ".join(words).decode(errors="replace")
        except OSError:  # ended since, or another user's
            continue
    return found


def last_lines(log: Path, num_characters: int = 2000) -> str:
    """Return the end of a log, for a message."""
    return log.read_text(errors="replace")[-num_characters:] if log.exists() else "no log"
