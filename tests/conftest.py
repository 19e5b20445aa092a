"""Share among all tests: array checks, S3 servers, recorded speech, short waits, one thread."""

import gc
import os
from pathlib import Path

# Before NumPy: OpenBLAS's own threads make small products many times slower on busy cores.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Java's second compiler and many collector threads never pay in short lives: 12 s of CPU, not 17.
os.environ["SPARK_SUBMIT_OPTS"] = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"

import pytest
from hypothesis import settings

from tests.array_checks import install_checks
from tests.fuzzing.outcomes import IS_SEARCH, num_examples

# Before the packages: calls with arrays of another shape or type fail, in xdist's workers too.
install_checks("pipeline", "training")

# Collecting the tests makes 700,000 objects and no garbage: to look for some took 2 s of 16.
gc.disable()

# A deadline would time examples: beside other tests 200 ms have passed for nothing. Each run has
# the same examples, so that its outcome is the commit's; `make chaos` searches with others.
settings.register_profile(
    "megahour", deadline=None, max_examples=num_examples(40), derandomize=not IS_SEARCH
)
settings.load_profile("megahour")

pytest_plugins = [
    "tests.s3_server",
    "tests.faults.failing_store.scripted_server",
    "tests.ceph_server",
    "tests.job_programs",
    "tests.file_scheduling",
    "tests.cpu_times",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --kills and --schedules, the lengths of two tests."""
    lengths = (
        ("--kills", 5, "processes that tests/faults/killed_processes/test_chaos.py kills a place"),
        ("--schedules", 10_000, "random schedules of tests/simulation/test_exploration.py"),
    )
    for option, default, text in lengths:
        help_text = f"{text}; default: {default}"
        parser.addoption(option, type=int, default=default, metavar="N", help=help_text)


@pytest.fixture(scope="session", autouse=True)
def rank_server(request: pytest.FixtureRequest) -> None:
    """Start it before the synthesis of a corpus starts its own; it imports torch meanwhile.

    Tests marked `cluster` fork no ranks, and save 6 s of CPU in each process.
    """
    from tests.training.rank_context import start_rank_server  # noqa: PLC0415 - as torch below

    if any(item.get_closest_marker("cluster") is None for item in request.session.items):
        start_rank_server()


@pytest.fixture(scope="session", autouse=True)
def single_thread() -> None:
    """Compute in one thread per process: tests state facts, they do not race for cores."""
    import torch  # noqa: PLC0415 - 2 s, which the process that only distributes tests saves

    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def an4_dir() -> Path:
    """Return the Kaldi data directory of the AN4 corpus beside the checkout."""
    return Path(__file__).parents[2] / "shared" / "corpora" / "an4"


@pytest.fixture
def quick_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let refused objects be decided after three short waits, with patience for thirty.

    Without any wait patience would never end where no object answers.
    """
    monkeypatch.setattr("pipeline.steps.audio_reads.CONFIRMING_WAITS_S", (0.001,) * 3)
    monkeypatch.setattr("pipeline.steps.audio_reads.PATIENCE_S", 0.03)


def pytest_collection_finish() -> None:
    """Let the garbage collector begin with the tests, and pass over what was made before them."""
    gc.freeze()
    gc.enable()
