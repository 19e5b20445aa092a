"""The guide's examples, as a user runs them."""

import re
from pathlib import Path

from tests.training.forked_programs import run_on_ranks
from training import trainers

ROOT = Path(__file__).parents[3]
REPORT = """
import os
total = sum(parameter.double().sum().item() for parameter in model.parameters())
with open(f"{name}-{os.environ['RANK']}", "w") as file:  # what ranks print may come out mixed
    file.write(str(total))
"""


def test_examples_run_on_torchruns_ranks(tmp_path: Path) -> None:
    """Copied from the guide, one for each trainer trains on four ranks, which end with one model.

    One after the other in one start of the ranks, as starting takes most of the time.
    """
    text = (ROOT / "training/trainers/EXAMPLES.md").read_text()
    examples = {
        re.search(r"import (\w+)\n\n", example)[1]: example
        for example in re.findall(r"```python\n(.*?)```", text, re.S)
    }
    assert set(examples) == set(trainers.__all__) - {"Trainer"}
    script = tmp_path / "example.py"
    named = (f"{example}name = {name!r}\n{REPORT}" for name, example in examples.items())
    script.write_text("".join(named))
    run_on_ranks(4, script, (), tmp_path)
    for name in examples:
        totals = [path.read_text() for path in tmp_path.glob(f"{name}-*")]
        assert len(totals) == 4
        assert len(set(totals)) == 1
