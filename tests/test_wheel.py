"""The wheel that `make dist` builds is whole, and alone it checks and plans."""

import os
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from infra.spark.packaging import closure
from tests.source_trees import PACKAGES, REPOSITORY

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build it from a copy of the tree, with the setuptools that is here: no network is asked."""
    copy, built = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE", "megahour.py"):
        shutil.copy(REPOSITORY / name, copy)
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(REPOSITORY / package, copy / package, ignore=ignored)
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", built)
    done = subprocess.run(
        [*PIP, "wheel", *options, copy], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (found,) = built.glob("megahour-*.whl")
    return Path(found)


def test_the_wheel_holds_what_the_tree_holds(wheel: Path) -> None:
    """Every module, template, recipe and cluster file, and py.typed, by which types are whole."""
    names = set(zipfile.ZipFile(wheel).namelist())
    needed = {
        str(path.relative_to(REPOSITORY))
        for package in PACKAGES
        for ending in ("*.py", "*.toml", "*.json", "*.html", "*.css", "py.typed")
        for path in (REPOSITORY / package).rglob(ending)
    }
    assert needed - names == set()
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert {name.partition("/")[0] for name in names if name.startswith("tests")} == set()


def test_installed_alone_it_checks_and_plans(wheel: Path, tmp_path: Path) -> None:
    """In an environment of its own, with what it requires and no extra: no index is asked."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    options = ("install", "--no-deps", "--no-index", wheel)
    subprocess.run([*PIP[:3], "--python", python, *PIP[3:], *options], check=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (metadata,) = site.glob("megahour-*.dist-info")
    requires = Distribution.at(metadata).requires or ()
    for each in closure([each for each in requires if "extra ==" not in each]).values():
        for file in each.files or ():
            if file.parts[0] not in ("..", "__pycache__"):
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).symlink_to(str(each.locate_file(file)))
    done = subprocess.run(
        [python, "-P", REPOSITORY / "tests" / "installed_package.py"],
        cwd=tmp_path,
        env={"PATH": os.defpath},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
