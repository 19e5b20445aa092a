"""The trainers are a library of their own: typed, without Spark, Kaldi or a store."""

import subprocess
import sys
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).parents[3]
HEAVY = ("pyspark", "py4j", "kaldi_decoder", "kaldifst", "kaldi_native_fbank", "boto3", "s3fs")


def test_trainers_import_neither_spark_nor_kaldi() -> None:
    """A process that imports them, or the torch dataset, has loaded none of the others."""
    code = (
        "import sys, training.trainers, training.distributed.process_group\n"
        f"heavy = {HEAVY!r}\n"
        "def loaded(): return sorted({n.split('.')[0] for n in sys.modules} & set(heavy))\n"
        "assert not loaded(), loaded()\n"
        "import training.data.partition_dataset\n"
        "assert not set(loaded()) & {'pyspark', 'py4j', 'kaldi_decoder', 'kaldifst'}, loaded()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_every_package_is_typed() -> None:
    """Type checkers read a package's annotations only where py.typed says that they are whole."""
    for package in ("infra", "pipeline", "training", "jobs"):
        assert (files(package) / "py.typed").is_file()
