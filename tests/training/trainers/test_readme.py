"""The README's example, as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_example_runs_under_torchrun(tmp_path: Path) -> None:
    """Copied from the README, the example trains on four ranks, which end with one model."""
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "training/README.md").read_text(), re.S)
    script = tmp_path / "example.py"
    script.write_text(example + "    print('sum', model.weight.double().sum().item())\n")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [sys.executable, *launch, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sums = re.findall(r"sum (\S+)", done.stdout)
    assert len(sums) == 4
    assert len(set(sums)) == 1
