"""A DAG folder with workflows, and an Airflow of its own that runs them by dag.test()."""

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.job_programs import RunJob
from tests.whole_path.processes import TINY

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-airflow" / "bin" / "python"
MARK = "MEGAHOUR_TEST_DAG"


@dataclass(frozen=True)
class Running:
    """Running is a dag.test() at work: its process, its output, and the mark of all it starts."""

    process: "subprocess.Popen[bytes]"
    log: Path
    mark: str

    def answer(self) -> dict[str, Any]:
        """Wait for the end; return what Airflow says."""
        assert self.process.wait() == 0, self.log.read_text()[-4000:]
        return json.loads(self.log.read_text().splitlines()[-1])

    def kill_driver(self, run: Path) -> dict[Path, int]:
        """Wait for the first commit of features, and kill their driver; return what was there."""
        while not (found := commits_below(run)):
            assert self.process.poll() is None, "it ended before a task was committed"
            time.sleep(0.02)
        (driver,) = drivers(self.mark)
        os.kill(driver, signal.SIGKILL)
        return found


@dataclass(frozen=True)
class DagFolder:
    """DagFolder holds the DAG file and workflows of runs in one folder, on one corpus."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> "DagFolder":
        """Make the folder, and Airflow's database."""
        assert PYTHON.exists(), f"{PYTHON} is not there: make .venv-airflow/.ready"
        made = cls(folder)
        made.dags.mkdir()
        (made.dags / "megahour_dag.py").symlink_to(ROOT / "infra" / "airflow" / "megahour_dag.py")
        migrate = [str(PYTHON), "-m", "airflow", "db", "migrate"]
        subprocess.run(migrate, env=made.environment(), check=True, capture_output=True)
        return made

    @property
    def dags(self) -> Path:
        return self.folder / "dags"

    @property
    def settings(self) -> dict[str, str]:
        """The settings of all runs: a corpus beside them, and audio outside of it."""
        return {
            "corpus.uri": str(self.folder / "corpus"),
            "corpus.audio_prefixes": json.dumps([str(self.folder / "nights")]),
        }

    def run(self, name: str) -> Path:
        """Return the place of a run."""
        return self.folder / "runs" / name

    def add(self, run_job: RunJob, name: str, run: str, *options: str) -> None:
        """Write the workflow `name` for a run, whose name may be a template."""
        place = ("--recipe", str(TINY), "--run", str(self.run(run)), "--name", name)
        given = [f"{key}={value}" for key, value in self.settings.items()]
        more = [part for each in given for part in ("--set", each)]
        retries = ("--retries", "1", "--retry-delay-s", "0")
        said = run_job("workflow", *place, *more, *retries, *options)
        assert said.code == 0, said.err
        (self.dags / f"{name}.workflow.json").write_text(said.out)

    @contextmanager
    def running(self, name: str, date: str, *tasks_left_out: str) -> Iterator[Running]:
        """Run a DAG for a date; kill Airflow at the end, and with it what still runs."""
        mark = uuid.uuid4().hex
        program = Path(__file__).with_name("dag_run.py")
        command = [str(PYTHON), str(program), str(self.dags), name, date, *tasks_left_out]
        log = self.folder / f"{name}-{date}.log"
        environment = {**self.environment(), MARK: mark}
        with log.open("wb") as output:
            process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
        try:
            yield Running(process, log, mark)
        finally:
            process.kill()
            process.wait()

    def environment(self) -> dict[str, str]:
        """Return Airflow's environment, which knows nothing of ours."""
        return {
            "HOME": str(self.folder),
            "PATH": os.defpath,
            "SPARK_SUBMIT_OPTS": os.environ["SPARK_SUBMIT_OPTS"],
            "AIRFLOW_HOME": str(self.folder / "airflow"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.dags),
            "MEGAHOUR_WORKFLOWS": str(self.dags),
        }


def commits_below(run: Path) -> dict[Path, int]:
    """Return the commit records of features, each with its time of writing in nanoseconds."""
    return {path: path.stat().st_mtime_ns for path in run.glob("features/*/commits/*.json")}


def drivers(mark: str) -> Iterator[int]:
    """Yield the JVMs of feature extraction that the marked DAG has started."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes()
            program, *words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        is_driver = program.endswith(b"/java") and any(b"extract_features.py" in w for w in words)
        if is_driver and f"{MARK}={mark}".encode() in environment:
            yield int(process.name)
