"""A user's folder with the name of one of megahour's packages is noticed before anything breaks."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start Python where the folder's packages come before those of megahour."""
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["training", "pipeline", "infra"])
@pytest.mark.parametrize("as_file", [False, True])
def test_a_hidden_lower_layer_is_named(tmp_path: Path, name: str, as_file: bool) -> None:
    """A folder or a file of the name ends a command with 2, and one line says what to do."""
    if as_file:
        (tmp_path / f"{name}.py").write_text("")
    else:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("")
    done = start(tmp_path, "-m", "jobs.verify", "--help")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert f"{tmp_path / name}" in line
    assert f"hides megahour's package {name} " in line
    assert "start the command in another folder" in line
    assert "rename it" in line


def test_hidden_jobs_are_named_by_the_console_script(tmp_path: Path) -> None:
    """The console script lies apart from the packages, so that it can say so."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "__init__.py").write_text("")
    done = start(tmp_path, "-c", "from megahour import main; main()")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{tmp_path / 'jobs'} hides megahour's package jobs" in done.stderr


def test_a_folder_without_modules_hides_nothing(tmp_path: Path) -> None:
    """Data in a folder `training` beside the command hide no package that is on the path."""
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "utterances.txt").write_text("one\n")
    done = start(tmp_path, "-c", "import jobs, training, infra.settings")
    assert done.returncode == 0, done.stderr
