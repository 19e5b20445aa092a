"""The megahour command lists every command of jobs/, starts each, and notices hidden packages."""

import ast
import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jobs.cli.megahour import STORY, listing, main, module_of, summary_of
from jobs.run import JOBS, launches
from jobs.run_table import STEPS
from megahour import main as script

NAMES = [name for chapter in STORY.values() for name in chapter]
MAX_WIDTH = 100
HEAVY = {"torch", "pyspark", "numpy", "boto3", "pyarrow", "matplotlib"}


def test_the_list_is_complete() -> None:
    """Each program at the top of jobs/ is listed once, and nothing else is."""
    programs = {path.stem for path in JOBS.glob("*.py")}
    programs -= {
        "__init__",
        "__main__",
        "ingest_sources",
        "lexicon_sources",
        "run_table",
        "volumes",
    }
    assert sorted(map(module_of, NAMES)) == sorted(programs)


def test_each_line_is_the_first_of_the_jobs_docstring() -> None:
    """In the order of the story, within 100 columns, with the program that starts a step."""
    lines = listing().splitlines()
    found = [line for line in lines if line[2:].split(" ")[0] in NAMES and line.startswith("  ")]
    assert [line.split()[0] for line in found] == NAMES
    for line, name in zip(found, NAMES, strict=True):
        docstring = ast.get_docstring(ast.parse((JOBS / f"{module_of(name)}.py").read_text()))
        assert docstring is not None
        assert line.endswith(f" {docstring.splitlines()[0]}")
        starter = STEPS[name].starter if name in STEPS else "python"
        assert (starter in line) == (starter != "python")
    assert max(map(len, lines)) <= MAX_WIDTH
    assert "(003 IV-B2)" in summary_of("extract_features")


def test_the_steps_are_started_as_listed() -> None:
    """jobs.run starts the same steps in the same order, by the program that the list names."""
    started = launches(["--kaldi-dir", "data"], 2, 4)
    assert [launch.step for launch in started] == list(STEPS)
    words = {"python": sys.executable, "Spark": "spark-submit", "torchrun": "--nproc-per-node"}
    for launch in started:
        starter = words[STEPS[launch.step].starter]
        assert any(part.endswith(starter) for part in launch.prefix)


def test_listing_imports_nothing_heavy() -> None:
    """`python -m jobs` prints the list without torch, Spark or even NumPy."""
    program = (
        "import runpy, sys; sys.argv = ['jobs']; runpy.run_module('jobs', run_name='__main__'); "
        f"print(sorted({HEAVY!r} & sys.modules.keys()))"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{listing()}\n[]\n"


@pytest.mark.parametrize("name", NAMES)
def test_each_listed_command_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`megahour NAME --help` reaches the command's own parser, which tells its exit codes."""
    monkeypatch.setattr(sys, "argv", ["megahour", name, "--help"])
    monkeypatch.delitem(
        sys.modules, f"jobs.{module_of(name)}", raising=False
    )  # runpy starts it afresh
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: megahour {name}")
    assert "Exit codes: 0" in said


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("trian_student", "did you mean train_student?"),
        ("extract_feature", "did you mean extract_features?"),
        ("xyz", "megahour --help lists all commands"),
    ],
)
def test_an_unknown_command_is_refused(
    name: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, the name, and the nearest known one."""
    with pytest.raises(SystemExit) as ended:
        main([name])
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"megahour: unknown command {name}: {remedy}\n"


def test_the_console_script_is_this_command(capsys: pytest.CaptureFixture[str]) -> None:
    """pyproject's `megahour` and `python -m jobs` print the same."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    assert project["scripts"]["megahour"] == f"{script.__module__}:{script.__name__}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["jobs", "--help"])
        runpy.run_module("jobs", run_name="__main__")
        script()
    assert capsys.readouterr().out == 2 * f"{listing()}\n"


@pytest.mark.parametrize("is_error_closed", [False, True])
def test_a_reader_that_ends_first_ends_a_command_quietly(is_error_closed: bool) -> None:
    """`megahour ... | head` ends with 141, as other programs do, and prints no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "jobs", "plan", "--help"]
    error = writer if is_error_closed else subprocess.PIPE
    done = subprocess.run(command, stdout=writer, stderr=error, check=False, timeout=300)
    os.close(writer)
    assert (done.returncode, done.stderr or b"") == (141, b"")


REPOSITORY = Path(__file__).parents[3]


def start(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Start Python where the folder's packages come before those of megahour."""
    path = os.pathsep.join([str(folder), str(REPOSITORY)])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("name", "as_file"), [("training", False), ("pipeline", True), ("infra", False)]
)
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
