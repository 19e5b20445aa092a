"""Commands that neither train nor decode import neither torch nor Kaldi's libraries."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    program = f"HEAVY = {HEAVY!r}\n{PROGRAM}"
    command = [sys.executable, "-c", program, name, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    last = done.stdout.splitlines()[-1] if done.stdout else done.stderr
    assert last.endswith("imported []"), done.stderr
    assert "code 2" not in last, done.stderr
