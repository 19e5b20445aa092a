"""Try what `pip install megahour` alone gives: python tests/installed_package.py

The four commands of a base installation run, every other one names the extra that it lacks, the
libraries of C are there, and all of it has less than 100 MB. Wheels are tested by it, too.
"""

import io
import subprocess
import sys
import tempfile
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import distributions
from pathlib import Path

from jobs.cli import megahour
from jobs.cli.megahour import STORY
from pipeline.compiled_library import compiled_library

MEGAHOUR = Path(sys.executable).parent / "megahour"
PROJECT = Path(__file__).parents[1] / "pyproject.toml"
MAX_BYTES = 100_000_000


def said(*arguments: str) -> tuple[int, str]:
    """Run megahour in an empty folder; return its exit code and all that it printed."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [MEGAHOUR, *arguments], capture_output=True, text=True, check=False, cwd=folder
        )
    return done.returncode, done.stdout + done.stderr


def helped(name: str) -> tuple[object, str]:
    """Ask a command for help, in this process: another for each would take 20 s of CPU."""
    text, code = io.StringIO(), None
    with redirect_stdout(text), redirect_stderr(text):
        try:
            megahour.main([name, "--help"])
        except SystemExit as ended:
            code = ended.code
    return code, text.getvalue()


def installed_bytes() -> int:
    """Count the bytes of all installed packages, without those of an empty environment."""
    paths = [
        Path(str(file.locate()))
        for each in distributions()
        if each.name not in ("pip", "setuptools", "wheel")
        for file in each.files or ()
    ]
    return sum(path.stat().st_size for path in paths if path.is_file())


def main() -> None:
    """Try everything; an AssertionError says what is wrong."""
    run = ("--run", "run")
    for arguments, shown in (
        (("--help",), "usage: megahour COMMAND"),
        (("check", "--recipe", "recorded", *run), "recorded: all is well"),
        (("plan", "--hours", "1e6"), "Student pipeline"),
        (("status", "--recipe", "demo", *run), "0 of 15 steps are done"),
    ):
        code, text = said(*arguments)
        assert code == 0, (arguments, text)
        assert shown in text, (arguments, text)
    for name in (command for chapter in STORY.values() for command in chapter):
        code, text = helped(name)
        assert code in {0, None} or "pip install 'megahour[" in text, (name, text)
    modules = tomllib.loads(PROJECT.read_text())["tool"]["setuptools"]["ext-modules"]
    for each in modules:
        assert compiled_library(each["name"], {}) is not None, each["name"]
    size = installed_bytes()
    assert size < MAX_BYTES, size
    print(f"{size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
