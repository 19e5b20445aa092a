"""Submit the Spark steps from the package, without the checkout."""

import shutil
import subprocess
import tarfile
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyspark

from jobs.package import Package, package_steps
from tests.standalone_cluster import StandaloneCluster

_CLUSTER = Path(__file__).with_name("chaos_cluster.toml")
_SPARK_SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"


@dataclass(frozen=True)
class PackagedSteps:
    """PackagedSteps submits packaged programs from `folder`, with a Python that has nothing else.

    `unpacked` holds the one archive that is too large to unpack for every executor: that of
    generate_targets, a gigabyte with torch.
    """

    folder: Path
    cluster: StandaloneCluster
    packages: Mapping[str, Package]
    unpacked: Path

    @property
    def events(self) -> Path:
        """Return the folder of Spark's event logs."""
        return self.folder / "events"

    def submit(self, step: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start the step; its output goes to its log."""
        return self.start(step, self.packages[step].program, *arguments)

    def start(self, step: str, program: str, *arguments: str) -> "subprocess.Popen[bytes]":
        """Start any program with the step's package."""
        # The driver has this environment's dependencies; PYTHONPATH brings no .pth files, and so
        # no way to the checkout of an editable installation.
        installed = str(Path(pyspark.__file__).parents[1])
        command = [
            *(str(_SPARK_SUBMIT), "--master", self.cluster.master_url),
            *("--conf", f"spark.eventLog.dir={self.events.as_uri()}"),
            *self._options(step),
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

    def _options(self, step: str) -> Sequence[str]:
        package, python = self.packages[step], self.folder / "bare" / "bin" / "python"
        pythons = [f"spark.pyspark.{whose}python={python}" for whose in ("", "driver.")]
        options = [part for each in pythons for part in ("--conf", each)]
        if step != "generate_targets":
            return [*options, *package.options()]
        place = f"spark.executorEnv.PYTHONPATH={self.unpacked}"
        return [*options, "--py-files", package.code, "--conf", place]


def prepare(folder: Path, cluster: StandaloneCluster) -> PackagedSteps:
    """Make the packages and the bare Python below `folder`."""
    (folder / "events").mkdir(parents=True)
    packages = package_steps(folder / "dist")
    venv.create(folder / "bare", with_pip=False, symlinks=True)
    with tarfile.open(packages["generate_targets"].dependencies) as archive:
        archive.extractall(folder / "unpacked")  # Python 3.11.2 knows no filter
    # Compile by importing now, as a host's set-up would: 10 s less for each first task.
    command = [str(folder / "bare" / "bin" / "python"), "-c", "import torch, pyarrow, boto3"]
    path = {**cluster.environment, "PYTHONPATH": str(folder / "unpacked")}
    subprocess.run(command, env=path, check=True, timeout=300)
    return PackagedSteps(folder, cluster, packages, folder / "unpacked")


def remove_dead_executors(cluster: StandaloneCluster) -> None:
    """Remove what finished applications unpacked, 0.3 GB per executor."""
    for application in cluster.folder.glob("worker-*/app-*"):
        shutil.rmtree(application, ignore_errors=True)
