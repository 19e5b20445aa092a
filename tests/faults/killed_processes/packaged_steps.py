"""Submit the Spark steps from the package, without the checkout."""

import os
import shutil
import subprocess
import tarfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyspark

from infra.spark.packaging import write_code
from jobs.package import Package, package_step
from tests.faults.killed_processes.chaos_run import STEPS
from tests.standalone_cluster import StandaloneCluster

_CLUSTER = Path(__file__).with_name("chaos_cluster.toml")
_SPARK_SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"


@dataclass(frozen=True)
class PackagedSteps:
    """PackagedSteps submits packaged programs from `folder`, with a Python that has nothing else.

    `unpacked` is the place of each step's dependencies on every host. An executor that unpacks
    and compiles them itself takes 5 s of CPU and 0.4 GB more; with torch far more.
    """

    folder: Path
    cluster: StandaloneCluster
    packages: Mapping[str, Package]
    unpacked: Mapping[str, Path]

    @property
    def events(self) -> Path:
        """Return the folder of Spark's event logs."""
        return self.folder / "events"

    def submit(self, step: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start the step with the dependencies that lie on every host."""
        package = self.packages[step]
        place = f"spark.executorEnv.PYTHONPATH={self.unpacked[step]}"
        options = ("--py-files", package.code, "--conf", place)
        return self._start(step, options, package.program, *arguments)

    def start_from_archive(self, step: str, program: str) -> "subprocess.Popen[bytes]":
        """Start any program with the step's package, which each executor unpacks."""
        return self._start(step, self.packages[step].options(), program)

    def _start(
        self, step: str, options: Sequence[str], program: str, *arguments: str
    ) -> "subprocess.Popen[bytes]":
        # The driver has this environment's dependencies; PYTHONPATH brings no .pth files, and so
        # no way to the checkout of an editable installation.
        installed = str(Path(pyspark.__file__).parents[1])
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
                env={**self.cluster.environment, "PYTHONPATH": installed},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def log(self, step: str) -> Path:
        """Return the path of the step's output."""
        return self.folder / f"{step}.log"


def prepare(folder: Path, cluster: StandaloneCluster) -> PackagedSteps:
    """Make the packages, the bare Python and the unpacked dependencies below `folder`."""
    dist = folder / "dist"
    for each in (folder / "events", dist):
        each.mkdir(parents=True)
    code = write_code(dist)
    # Not of all steps: each of two more with torch would take 12 s of CPU to compress.
    packages = {step: package_step(step, code, dist) for step in STEPS}
    venv.create(folder / "bare", with_pip=False, symlinks=True)
    teacher, others = folder / "unpacked-teacher", folder / "unpacked"
    for place, step, modules in (
        (teacher, "generate_targets", "pipeline.steps.targets, training.targets.teacher"),
        (others, "extract_features", "pipeline.steps.features, pipeline.steps.repartition"),
    ):
        with tarfile.open(packages[step].dependencies) as archive:
            archive.extractall(place)  # Python 3.11.2 knows no filter
        # Compile by importing now, as a host's set-up would: 10 s less for each first task.
        command = [str(folder / "bare" / "bin" / "python"), "-c", f"import {modules}"]
        path = f"{place}{os.pathsep}{packages[step].code}"
        environment = {**cluster.environment, "PYTHONPATH": path}
        subprocess.run(command, env=environment, check=True, timeout=300)
    unpacked = {step: teacher if step == "generate_targets" else others for step in packages}
    return PackagedSteps(folder, cluster, packages, unpacked)


def remove_dead_executors(cluster: StandaloneCluster) -> None:
    """Remove what finished applications unpacked, 0.3 GB per executor."""
    for application in cluster.folder.glob("worker-*/app-*"):
        shutil.rmtree(application, ignore_errors=True)
