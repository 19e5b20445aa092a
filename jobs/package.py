"""Package the code and the dependencies of the Spark steps.

megahour package --folder dist
"""

import argparse
import json
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from importlib.resources import as_file, files
from pathlib import Path

from infra.cluster import Cluster, load_cluster
from infra.log_lines import begin_log, log, progress_bar
from infra.spark.packaging import DEPENDENCIES, with_drivers, write_code, write_dependencies
from infra.spark.session import launch_options
from jobs.cli.arguments import (
    Parser,
    add_log_argument,
    add_step_cluster_argument,
    step_clusters,
    toml_path,
)
from jobs.cli.command_line import ending
from jobs.run_table import INGEST, spark_steps

PACKAGE = "package"

_FOR_HOSTS = (
    "aws/install_host.sh",
    "platforms/databricks_step.py",
    "platforms/dataproc_credentials.sh",
)
"""What hosts of EMR and of Dataproc run when they start, and Databricks in place of a step."""

SPARK = f"""\
for Spark {version("pyspark")}, Python {sys.version_info.major}.{sys.version_info.minor} and \
{sysconfig.get_platform()}"""
"""The versions that a cluster must have."""

HELP = f"""\
Write what a cluster needs to run the Spark steps and `verify`, and print the commands for these:
megahour-VERSION.zip (the code), the program of each step, dependencies-DIGEST.tar.gz, one for each
set that the cluster files of the steps name, in the versions installed here, and what hosts of EMR,
Databricks and Dataproc start.

These are {SPARK}; the hosts of the cluster need the same Python.
The driver runs in an environment like this one, from any directory: it reads the code from the zip.
Executors unpack the archive when they start. Where that is too slow (torch), unpack it once on
every host, leave --archives out, and set spark.executorEnv.PYTHONPATH to that folder. Platforms on
which the driver runs elsewhere take the same files: docs/running.
"""


@dataclass(frozen=True, slots=True)
class Package:
    """Package holds the files that spark-submit needs for one step."""

    program: str
    code: str
    dependencies: str
    launch: tuple[str, ...]

    def options(self) -> list[str]:
        """Return the options of spark-submit, which precede the program."""
        return [
            *self.launch,
            *("--py-files", self.code),
            *("--archives", f"{self.dependencies}#{DEPENDENCIES}"),
            *("--conf", f"spark.executorEnv.PYTHONPATH={DEPENDENCIES}"),
        ]


def package_steps(folder: Path, clusters: Mapping[str, str]) -> dict[str, Package]:
    """Write all packages into `folder`; return them by step.

    `clusters` has cluster files of the user's own by step.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name in _FOR_HOSTS:
        with as_file(files("infra") / name) as source:
            shutil.copy(source, folder)
    code = write_code(folder)
    log(f"{code}: {code.stat().st_size >> 10} kB")
    programs = (*spark_steps(), "verify")  # those whose tasks a cluster runs
    steps = progress_bar(programs, description="packages", unit="step")
    return {
        step: package_step(step, load_cluster(toml_path(clusters.get(step, step))), code, folder)
        for step in steps
    }


def package_step(step: str, cluster: Cluster, code: Path, folder: Path) -> Package:
    """Write the program and the dependencies of one step into `folder`, beside the `code`."""
    dependencies = write_dependencies(with_drivers(cluster.python_dependencies), folder)
    program = folder / f"{step}.py"
    with as_file(files("jobs") / f"{step}.py") as source:
        shutil.copyfile(source, program)
    return Package(str(program), str(code), str(dependencies), tuple(launch_options(cluster)))


def main() -> None:
    """Parse the command line, write the packages, print the commands."""
    parser = Parser(
        prog=f"megahour {PACKAGE}",
        description=HELP,
        epilog="Exit codes: 0 written, 1 failed, 2 bad usage.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--folder", type=Path, default=Path("dist"), help="folder to write into, default dist"
    )
    add_step_cluster_argument(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_log_argument(parser)
    arguments = parser.parse_args()
    begin_log(PACKAGE, arguments.log_format)
    with ending(PACKAGE):
        packages = package_steps(arguments.folder, step_clusters(arguments.step_cluster))
    if arguments.json:
        document = {
            step: {**asdict(package), "options": package.options()}
            for step, package in packages.items()
        }
        print(json.dumps(document))
        return
    print(f"{arguments.folder}: {SPARK}", file=sys.stderr)
    for step, package in packages.items():
        command = ["spark-submit", *package.options(), package.program]
        source = " --manifest URI" if step == INGEST else ""
        print(f"{shlex.join(command)} --recipe RECIPE --run URI{source}")


if __name__ == "__main__":
    main()
