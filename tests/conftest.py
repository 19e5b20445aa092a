"""What every test may use: S3 servers, where the recorded speech lies, one thread a process."""

import os
from pathlib import Path

# Before NumPy: OpenBLAS's own threads make small products many times slower on busy cores.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import pytest
import torch
from hypothesis import settings

from tests.ceph_server import ceph_bucket, ceph_endpoint
from tests.s3_server import s3_bucket, s3_endpoint
from tests.training.rank_context import start_rank_server

# A deadline would time examples: beside other tests 200 ms have passed for nothing.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

__all__ = ["ceph_bucket", "ceph_endpoint", "s3_bucket", "s3_endpoint"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the chaos test goes on."""
    help_text = "processes that tests/faults/test_chaos.py kills in all; default: 30"
    parser.addoption("--kills", type=int, default=30, metavar="N", help=help_text)


@pytest.fixture(scope="session", autouse=True)
def rank_server() -> None:
    """Start it before the synthesis of a corpus starts its own; it imports torch meanwhile."""
    start_rank_server()


@pytest.fixture(scope="session", autouse=True)
def single_thread() -> None:
    """One thread a process: tests state facts, they do not race for cores."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def an4_dir() -> Path:
    """The Kaldi data directory of the AN4 corpus that lies beside the checkout."""
    return Path(__file__).parents[2] / "shared" / "corpora" / "an4"
