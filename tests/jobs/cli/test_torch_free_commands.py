"""Commands that neither train nor decode import no torch, and no Kaldi but graphs."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import is_finished
from tests.small_run import make_run
from tests.whole_path.processes import TINY

HEAVY = ("torch", "scipy.signal", "kaldi_hmm_gmm", "kaldi_native_fbank", "kaldialign", "kaldifst")

PROGRAM = """
import json, runpy, sys
heavy = set(json.loads(sys.argv.pop()))
for name, *arguments in json.loads(sys.argv.pop()):
    sys.argv[:], code, before = [name, *arguments], 0, heavy & sys.modules.keys()
    try:
        runpy.run_module(f"jobs.{name}", run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code
    print(name, "code", code, "imported", sorted(heavy & sys.modules.keys() - before))
"""

RUN = ("ingest", "select_utterances", "extract_features", "repartition", "certify", "report")
QUERIES = ("status", "verify")
GRAPHS = ("bootstrap", "build_graph")
OTHERS = ("check", "plan", "run", "inspect_object", "retry", "scaling")


def arguments_of(name: str, folder: Path) -> list[str]:
    """Return what lets a command read its recipe and look at the run, or print its help."""
    place = ["--recipe", str(TINY), "--run", str(folder / "run")]
    options = {
        "ingest": [*place, "--kaldi-dir", "data", "--dry-run"],
        "check": [*place, "--device", "cpu"],
        "plan": ["--help"],
        "run": ["--help"],
        "retry": [*place, "--reason", "missing_object"],
        "scaling": ["--ranks", "1..8"],
        "inspect_object": [*place, "x"],
    }
    return options.get(name, [*place, "--dry-run"] if name in (*RUN, *GRAPHS) else place)


def test_commands_import_no_torch(tmp_path: Path) -> None:
    """Neither to read a recipe and look at a run, nor for --help; one process starts them all.

    The first command that imports one of these packages is named with it.
    """
    names = [*RUN, *QUERIES, *OTHERS, *GRAPHS]
    ends = ends_of([[name, *arguments_of(name, tmp_path)] for name in names])
    assert list(ends) == names
    imported = {name: end for name, end in ends.items() if not end.endswith(" imported []")}
    assert imported == {"bootstrap": "code 0 imported ['kaldifst']"}
    assert {name for name, end in ends.items() if end.startswith("code 2 ")} == set()


@pytest.fixture(scope="module")
def run_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run up to training partitions, with an utterance whose audio is bad."""
    return make_run(tmp_path_factory.mktemp("torch-free"))[1]


def test_certify_imports_no_torch_at_work(run_uri: str) -> None:
    """It reads the order of a whole sub-epoch, and writes the certificate."""
    small = ["--set", "student.minibatch_frames=32", "--set", "student.num_sub_epochs=1"]
    whole = ["--set", "student.num_whole_utterance_sub_epochs=0"]
    given = ["--recipe", "demo", "--run", run_uri, *small, *whole, "--ranks", "2", "--steps", "4"]
    assert ends_of([["certify", *given]]) == {"certify": "code 0 imported []"}
    assert is_finished(ObjectStore((run_uri,)), run_uri, "certificate")


def test_retry_imports_no_torch_at_work(run_uri: str, tmp_path: Path) -> None:
    """It takes a row back, and removes all steps that were made from it."""
    copied = str(shutil.copytree(run_uri, tmp_path / "run"))
    given = ["--recipe", str(TINY), "--run", copied, "--reason", "not_audio"]
    assert ends_of([["retry", *given, "--with-later-steps"]]) == {"retry": "code 0 imported []"}
    store = ObjectStore((copied,))
    for step, is_there in (("selection", True), ("features", False), ("partitions", False)):
        assert is_finished(store, copied, f"{step}/unlabelled") == is_there


def ends_of(commands: Sequence[Sequence[str]]) -> dict[str, str]:
    """Run commands in a process of their own; return each one's code and what it has imported."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(commands), json.dumps(HEAVY)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found = (line.partition(" ") for line in done.stdout.splitlines() if " imported [" in line)
    return {name: end for name, _, end in found}
