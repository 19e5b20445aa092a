"""The guide's example trains something else, and resumes on another number of ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from tests.training.data.uneven_run import NUM_SENONES, write_uneven_run
from tests.training.forked_programs import run_on_ranks

ROOT = Path(__file__).parents[3]
WATCH = """
heavy = {'pyspark', 'kaldi_decoder', 'kaldifst'}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


def test_the_example_trains_and_resumes(tmp_path: Path) -> None:
    """As printed: two ranks stop in the middle, one continues there, and the loss has fallen.

    It has thirty lines or so, and imports neither Spark nor Kaldi.
    """
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "training/data/README.md").read_text(), re.S
    )
    assert len([line for line in example.splitlines() if line]) <= 35
    lengths = [[90 + 30 * n for n in range(6)] for _ in range(8)]
    _, run_uri = write_uneven_run(tmp_path / "run", [[90]], lengths)
    script, state = tmp_path / "example.py", tmp_path / "state.pt"
    stop = "    for minibatch in DataLoader(dataset, batch_size=None):\n"
    assert stop in example
    first = example.replace(
        stop,
        f"{stop}        if dataset.state_dict()['cursor']['num_steps'] == 3:\n            break\n",
    )
    arguments = (run_uri, str(NUM_SENONES), str(state))
    script.write_text(first)
    run_on_ranks(2, script, arguments, tmp_path)
    cursor = torch.load(state, weights_only=True)["data"]["cursor"]
    assert (cursor["sub_epoch"], cursor["num_steps"], len(cursor["counts"])) == (0, 2, 2)
    script.write_text(f"{example}{WATCH}")
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1.75  # log 6 = 1.79 before any step
    after = torch.load(state, weights_only=True)["data"]["cursor"]
    assert after["sub_epoch"] == 1
