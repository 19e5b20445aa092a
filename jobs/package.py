"""Package the code and each Spark step's dependencies for a cluster; print how to submit them.

python -m jobs.package --folder dist
"""

import argparse
import json
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.resources import as_file, files
from pathlib import Path

from infra.cluster import load_cluster
from infra.configuration import ConfigurationError
from infra.spark.packaging import write_code, write_dependencies
from jobs.run import launches

DEPENDENCIES = "dependencies"
"""The folder in an executor's working directory that the archive is unpacked to."""

HELP = """\
Writes megahour-VERSION.zip (the code), dependencies-DIGEST.tar.gz (one for each set that the
Spark steps' cluster files name, in the versions installed here) and each step's program, and
prints the options for spark-submit. What the cluster must have: Spark, and on its hosts the
Python minor version and platform of this one. The driver runs in an environment like this one,
from any directory: it reads the code from the zip. Executors unpack the archive when they
start; where that is too slow (torch), unpack it once on every host instead, leave --archives
out and set spark.executorEnv.PYTHONPATH to that place.
"""


@dataclass(frozen=True, slots=True)
class Package:
    """What spark-submit is given for one step: its program, the code, the dependencies."""

    program: str
    code: str
    dependencies: str

    def options(self) -> list[str]:
        """Options of spark-submit, before the program."""
        return [
            *("--py-files", self.code),
            *("--archives", f"{self.dependencies}#{DEPENDENCIES}"),
            *("--conf", f"spark.executorEnv.PYTHONPATH={DEPENDENCIES}"),
        ]


def package_steps(folder: Path) -> dict[str, Package]:
    """Write all packages into `folder`; what each Spark step needs, by step."""
    folder.mkdir(parents=True, exist_ok=True)
    code = write_code(folder)
    return {step: _package_step(step, code, folder) for step in spark_steps()}


def spark_steps() -> list[str]:
    """The steps that spark-submit starts, in order."""
    each = launches(kaldi_dir="", supervised_ranks=1, student_ranks=1)
    return [launch.step for launch in each if Path(launch.prefix[0]).name == "spark-submit"]


def _package_step(step: str, code: Path, folder: Path) -> Package:
    dependencies = write_dependencies(load_cluster(step).python_dependencies, folder)
    program = folder / f"{step}.py"
    with as_file(files("jobs") / f"{step}.py") as source:
        shutil.copyfile(source, program)
    return Package(str(program), str(code), str(dependencies))


def main() -> None:
    """Parse the command line, write the packages, print the commands."""
    parser = argparse.ArgumentParser(
        description=HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("dist"), help="default: dist")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    try:
        packages = package_steps(arguments.folder)
    except (ConfigurationError, OSError) as error:
        sys.exit(f"package: {error}")
    if arguments.json:
        told = {
            step: {**asdict(package), "options": package.options()}
            for step, package in packages.items()
        }
        print(json.dumps(told))
        return
    for package in packages.values():
        command = ["spark-submit", *package.options(), package.program]
        print(shlex.join(command), "--recipe RECIPE --run URI")


if __name__ == "__main__":
    main()
