"""What every test may use: where the recorded speech lies, and one thread a process."""

import os
from pathlib import Path

# Before NumPy: OpenBLAS's own threads make small products many times slower on busy cores.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def single_thread() -> None:
    """One thread a process: tests state facts, they do not race for cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def an4_dir() -> Path:
    """The Kaldi data directory of the AN4 corpus that lies beside the checkout."""
    return Path(__file__).parents[2] / "shared" / "corpora" / "an4"
