"""Commands that neither train nor decode import neither torch nor Kaldi's libraries."""

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

HEAVY = ("torch", "kaldi_decoder", "kaldi_hmm_gmm", "kaldi_native_fbank", "kaldialign", "kaldifst")

PROGRAM = """
import runpy, sys
name, *arguments = sys.argv[1:]
sys.argv, code = [name, *arguments], 0
try:
    runpy.run_module(f"jobs.{name}", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    code = ended.code
print("code", code, "imported", sorted(set(HEAVY) & sys.modules.keys()))
"""

RUN = ("ingest", "select_utterances", "extract_features", "repartition", "certify", "report")
QUERIES = ("status", "verify", "inspect_utterance")
OTHERS = ("check", "plan", "run", "inspect_object", "retry", "scaling")


@pytest.mark.parametrize("name", [*RUN, *QUERIES, *OTHERS])
def test_a_command_imports_no_torch(name: str, tmp_path: Path) -> None:
    """Neither to read its recipe and look at the run, nor for --help."""
    place = ["--recipe", str(TINY), "--run", str(tmp_path / "run")]
    options = {
        "ingest": [*place, "--kaldi-dir", "data", "--dry-run"],
        "inspect_utterance": [*place, "--utterance", "x"],
        "check": [*place, "--device", "cpu"],
        "plan": ["--help"],
        "run": ["--help"],
        "retry": [*place, "--reason", "missing_object"],
        "scaling": ["--ranks", "1..8"],
        "inspect_object": [str(tmp_path / "absent.parquet")],
    }
    given = options.get(name, [*place, "--dry-run"] if name in RUN else place)
    last = last_line_of(name, given)
    assert last.endswith("imported []")
    assert "code 2" not in last


@pytest.fixture(scope="module")
def run_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run up to training partitions, with an utterance whose audio is bad."""
    return make_run(tmp_path_factory.mktemp("torch-free"))[1]


def test_certify_imports_no_torch_at_work(run_uri: str) -> None:
    """It reads the order of a whole sub-epoch, and writes the certificate."""
    small = ["--set", "student.minibatch_frames=32", "--set", "student.num_sub_epochs=1"]
    whole = ["--set", "student.num_whole_utterance_sub_epochs=0"]
    given = ["--recipe", "demo", "--run", run_uri, *small, *whole, "--ranks", "2", "--steps", "4"]
    assert last_line_of("certify", given) == "code 0 imported []"
    assert is_finished(ObjectStore((run_uri,)), run_uri, "certificate")


def test_retry_imports_no_torch_at_work(run_uri: str, tmp_path: Path) -> None:
    """It takes a row back, and removes all steps that were made from it."""
    copied = str(shutil.copytree(run_uri, tmp_path / "run"))
    given = ["--recipe", str(TINY), "--run", copied, "--reason", "not_audio"]
    assert last_line_of("retry", [*given, "--with-later-steps"]) == "code 0 imported []"
    store = ObjectStore((copied,))
    for step, is_there in (("selection", True), ("features", False), ("partitions", False)):
        assert is_finished(store, copied, f"{step}/unlabelled") == is_there


def last_line_of(name: str, given: Sequence[str]) -> str:
    """Run a command in a process of its own; return its code and what it has imported."""
    program = f"HEAVY = {HEAVY!r}\n{PROGRAM}"
    command = [sys.executable, "-c", program, name, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]
