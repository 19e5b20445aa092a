"""A training step that `jobs.run` launches survives the loss of a rank."""

import subprocess
from pathlib import Path

from jobs.run import launches

DIES_ONCE = """
import os, sys, time
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    sys.exit(1) if os.environ["RANK"] == "1" else time.sleep(100)
print("rank", os.environ["RANK"], *sys.argv[1:])
"""


def test_a_training_step_is_started_once_more(tmp_path: Path) -> None:
    """A rank that dies once, say in gloo's meeting, does not end the run."""
    script = tmp_path / "dies_once.py"
    script.write_text(DIES_ONCE)
    (launch,) = [each for each in launches("data", 2, 2) if each.step == "train_student"]
    command = [*launch.prefix, str(script), "--run", "somewhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {n} --run somewhere" for n in (0, 1)]
