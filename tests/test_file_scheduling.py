"""No long test is passed over, though `make faults` does not import all files."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.file_scheduling import LONG_RUNS
from tests.whole_path.processes import REPOSITORY

pytestmark = pytest.mark.chaos

FIXTURE = """
import pytest

@pytest.fixture(params=[pytest.param("ceph", marks=pytest.mark.cluster)])
def place(request):
    return request.param
"""
OF_A_FIXTURE = "def test_place(place):\n    assert place\n"
MARKED = "import pytest\n\n@pytest.mark.cluster\ndef test_place():\n    pass\n"
OTHER = "raise RuntimeError('imported')\n"


def collect(folder: Path, files: dict[str, str], *options: str) -> tuple[int, str]:
    """Collect the tests of these files; return pytest's exit code and its output."""
    folder.mkdir()
    for name, text in {**files, "pytest.ini": "[pytest]\nmarkers =\n  cluster\n  chaos\n"}.items():
        (folder / name).write_text(text)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--collect-only",
        "-p",
        "tests.file_scheduling",
    ]
    done = subprocess.run(
        [*command, "--rootdir", str(folder), *options, str(folder)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_mark_that_the_file_does_not_show_is_an_error(tmp_path: Path) -> None:
    """A fixture marks a test whose file does not say so: collecting all tests reports it."""
    hidden = {"conftest.py": FIXTURE, "test_hidden.py": OF_A_FIXTURE}
    code, said = collect(tmp_path / "hidden", hidden)
    assert code == 4
    assert "test_hidden.py: need the text" in said
    code, said = collect(
        tmp_path / "shown", {**hidden, "test_hidden.py": f"# Server\n{OF_A_FIXTURE}"}
    )
    assert (code, "test_hidden.py::test_place[ceph]" in said) == (0, True)


def test_other_files_are_not_imported(tmp_path: Path) -> None:
    """As `make faults` collects: without its -m, the same file fails."""
    files = {"test_marked.py": MARKED, "test_other.py": OTHER}
    code, said = collect(tmp_path / "few", files, "-m", LONG_RUNS[0])
    assert (code, "test_marked.py::test_place" in said) == (0, True)
    assert collect(tmp_path / "all", files)[0] == 2
