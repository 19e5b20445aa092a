"""Submit the Spark steps from the package, without the checkout."""

import os
import shutil
import subprocess
import tarfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyspark

from infra.cluster import load_cluster
from infra.spark.packaging import write_code
from jobs.package import Package, package_step
from jobs.run import JOBS
from tests.faults.killed_processes.chaos_run import STEPS
from tests.standalone_cluster import StandaloneCluster

PACKAGED = "extract_features"
"""The step whose archive is written: the others but target generation need no more than it has."""

_CLUSTER = Path(__file__).with_name("chaos_cluster.toml")
_SPARK_SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"
_INSTALLED = str(Path(pyspark.__file__).parents[1])
"""This environment's dependencies; PYTHONPATH reads no .pth files, and so does not lead to the
checkout of an editable installation."""


@dataclass(frozen=True)
class PackagedSteps:
    """PackagedSteps submits packaged programs from `folder`, with a Python that has nothing else.

    The dependencies lie unpacked on every host: an executor that unpacks and compiles them itself
    takes 5 s of CPU and 0.4 GB more. Target generation also finds torch where it is installed; to
    compress and unpack it would take 20 s.
    """

    folder: Path
    cluster: StandaloneCluster
    package: Package

    @property
    def events(self) -> Path:
        """Return the folder of Spark's event logs."""
        return self.folder / "events"

    @property
    def unpacked(self) -> Path:
        """Return the folder of the unpacked dependencies."""
        return self.folder / "unpacked"

    def program(self, step: str) -> str:
        """Return the path of the step's program, beside the package."""
        return str(Path(self.package.program).with_name(f"{step}.py"))

    def submit(self, step: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start the step with the dependencies that lie on every host."""
        place = str(self.unpacked)
        if step == "generate_targets":
            place += os.pathsep + _INSTALLED
        settings = ("--conf", f"spark.executorEnv.PYTHONPATH={place}")
        options = ("--py-files", self.package.code, *settings)
        return self._start(step, options, self.program(step), *arguments)

    def start_from_archive(self, program: str) -> "subprocess.Popen[bytes]":
        """Start any program with the package, whose archive its one executor unpacks."""
        one_executor = ("--conf", "spark.cores.max=2")
        return self._start(PACKAGED, (*self.package.options(), *one_executor), program)

    def _start(
        self, step: str, options: Sequence[str], program: str, *arguments: str
    ) -> "subprocess.Popen[bytes]":
        python = self.folder / "bare" / "bin" / "python"
        command = [
            # The package's options name its cluster file's master; a later option wins.
            *(str(_SPARK_SUBMIT), *options, "--master", self.cluster.master_url),
            *("--conf", f"spark.eventLog.dir={self.events.as_uri()}"),
            *("--conf", f"spark.pyspark.python={python}"),
            *("--conf", f"spark.pyspark.driver.python={python}"),
            *(program, *arguments, "--cluster", str(_CLUSTER)),
        ]
        with self.log(step).open("ab") as log:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env={**self.cluster.environment, "PYTHONPATH": _INSTALLED},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, step: str) -> Path:
        """Return the path of the step's output."""
        return self.folder / f"{step}.log"


def prepare(folder: Path, cluster: StandaloneCluster) -> PackagedSteps:
    """Make the package, the bare Python and the unpacked dependencies below `folder`."""
    dist = folder / "dist"
    for each in (folder / "events", dist):
        each.mkdir(parents=True)
    steps = PackagedSteps(
        folder, cluster, package_step(PACKAGED, load_cluster(PACKAGED), write_code(dist), dist)
    )
    for step in STEPS:
        shutil.copyfile(JOBS / f"{step}.py", steps.program(step))
    venv.create(folder / "bare", with_pip=False, symlinks=True)
    with tarfile.open(steps.package.dependencies) as archive:
        archive.extractall(steps.unpacked)  # Python 3.11.2 knows no filter
    # Compile by importing now, as a host's set-up would: 10 s less for each first task.
    command = [str(folder / "bare" / "bin" / "python"), "-c"]
    command.append("import pipeline.steps.features, pipeline.steps.repartition")
    path = f"{steps.unpacked}{os.pathsep}{steps.package.code}"
    environment = {**cluster.environment, "PYTHONPATH": path}
    subprocess.run(command, env=environment, check=True, timeout=300)
    return steps


def remove_dead_executors(cluster: StandaloneCluster) -> None:
    """Remove what finished applications unpacked, 0.3 GB per executor."""
    for application in cluster.folder.glob("worker-*/app-*"):
        shutil.rmtree(application, ignore_errors=True)
