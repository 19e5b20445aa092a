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
    # A file a rank: what four ranks print into one pipe may come out mixed.
    report = "    open(f'sum-{group.rank()}', 'w').write(str(model.weight.double().sum().item()))\n"
    script.write_text(example + report)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [sys.executable, *launch, str(script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sums = [path.read_text() for path in tmp_path.glob("sum-*")]
    assert len(sums) == 4
    assert len(set(sums)) == 1
