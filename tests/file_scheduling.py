"""Hand test files to pytest-xdist's processes, the longest first, and each as late as possible."""

import re
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling, Scheduling
from xdist.workermanage import WorkerController

LONG_FILES = (
    "test_chaos.py",
    "test_an4.py",
    "test_s3.py",
    "test_nightly.py",
    "test_megahour_dag.py",
    "test_exploration.py",
    "test_ceph.py",
    "test_rank_chaos.py",
    "test_distillation_page.py",
    "test_trainer.py",
    "test_papers_recipes.py",
    "test_ctc_teacher_run.py",
    "test_faulty_pipeline.py",
    "test_session.py",
)
"""Begun last, one of them would leave the other processes idle."""

LONG_TESTS = ("test_rank_chaos.py",)
"""Files whose tests take a minute each and share nothing: any process takes the next one."""

CEPH = "ceph"
"""A mark in the names of the tests on Ceph, whose cluster one process starts for all of them."""

SPARK = "spark"
SPARK_TESTS = ("test_session.py", "test_manifests_in_s3.py")
"""Files whose tests take the Spark that their process starts: 12 s of CPU."""

LONG_MARKS = ("cluster", "chaos")
"""The marks of tests that `make test` leaves to `make faults` and `make chaos`."""

LONG_RUNS = ("cluster and not chaos", "cluster or chaos")
"""The values of -m of `make faults` and `make chaos`."""

MAY_BE_MARKED = re.compile(r"mark\.(cluster|chaos)|\bServer\b")
"""The text of a file with such tests, marked by the file or by a fixture of a server."""


class LateScheduling(LoadFileScheduling):
    """LateScheduling keeps a file until a process begins the last test that it has.

    xdist hands it out a test earlier, so that it waits behind two tests of minutes. All tests on
    Ceph count as one file, and so do those on one process's Spark.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        if CEPH in nodeid:
            return CEPH
        if file.endswith(SPARK_TESTS):
            return SPARK
        return nodeid if file.endswith(LONG_TESTS) else file

    def _reschedule(self, node: WorkerController) -> None:
        if not self.workqueue or self._pending_of(self.assigned_work[node]) <= 1:
            super()._reschedule(node)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling | None:
    """Replace --dist loadfile."""
    return LateScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import, for long tests, only files that may have some."""
    if config.getoption("markexpr") not in LONG_RUNS or not collection_path.match("test_*.py"):
        return None
    return None if may_be_marked(collection_path) else True


def may_be_marked(path: Path) -> bool:
    """Return whether a file may have tests with one of LONG_MARKS."""
    return MAY_BE_MARKED.search(path.read_text(encoding="utf-8")) is not None


def is_long(item: pytest.Item) -> bool:
    """Return whether a test has one of LONG_MARKS."""
    return any(item.get_closest_marker(mark) for mark in LONG_MARKS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files, in their order.

    Raises UsageError for a long test in a file that `make faults` and `make chaos` pass over.
    """
    marked = {item.path for item in items if is_long(item)}
    if unsaid := sorted(path for path in marked if not may_be_marked(path)):
        need = f"need the text {MAY_BE_MARKED.pattern} in a file with tests of {LONG_MARKS}"
        raise pytest.UsageError(f"{', '.join(map(str, unsaid))}: {need}")
    order = {name: place for place, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))
