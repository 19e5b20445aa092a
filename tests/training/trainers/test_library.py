"""The trainers are a library of their own: typed, without Spark, Kaldi or a store; its examples."""

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

from tests.training.forked_programs import run_on_ranks
from training import trainers

ROOT = Path(__file__).parents[3]
HEAVY = ("pyspark", "py4j", "kaldifst", "kaldi_native_fbank", "boto3")


def test_trainers_import_neither_spark_nor_kaldi() -> None:
    """A process that imports them, or the torch dataset, has loaded none of the others."""
    code = (
        "import sys, training.trainers, training.distributed.process_group\n"
        f"heavy = {HEAVY!r}\n"
        "def loaded(): return sorted({n.split('.')[0] for n in sys.modules} & set(heavy))\n"
        "assert not loaded(), loaded()\n"
        "import training.data.partition_dataset\n"
        "assert not set(loaded()) & {'pyspark', 'py4j', 'kaldifst'}, loaded()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_package_is_typed() -> None:
    """Type checkers read a package's annotations only where py.typed says that they are whole."""
    for package in ("infra", "pipeline", "training", "jobs"):
        assert (files(package) / "py.typed").is_file()


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
