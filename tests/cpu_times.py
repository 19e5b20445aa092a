"""Print the seconds of CPU that each test file took, the largest first, at the end of a run.

A process of tests counts itself, the processes that it waited for, and those that still run below
it, such as a JVM. What a killed process leaves to others is not counted.
"""

from collections import Counter
from collections.abc import Iterator

import psutil
import pytest
from xdist.workermanage import WorkerController

SHOWN_S = 1.0
"""Files below this are printed as one sum."""

COLLECTION = "start and collection"


def cpu_seconds() -> float:
    """Return the CPU time of this process and of all below it, of those that ended too."""
    this = psutil.Process()
    total = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])  # user, system, and of children waited for
        except psutil.Error:  # it ended meanwhile, and its parent counts it
            continue
    return total


class CpuTimes:
    """CpuTimes adds up the seconds of each file, of all processes of a run."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._counted_s = 0.0

    def _count(self, name: str) -> None:
        now_s = cpu_seconds()
        self.seconds[name] += now_s - self._counted_s
        self._counted_s = now_s

    def pytest_collection_finish(self) -> None:
        """Count what the imports took."""
        self._count(COLLECTION)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Iterator[object]:
        """Count a file after its last test, with the fixtures that end then."""
        result = yield
        if nextitem is None or nextitem.path != item.path:
            self._count(item.nodeid.partition("::")[0])
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand the counts of a process of pytest-xdist to the one that prints them."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["cpu_seconds"] = dict(self.seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: WorkerController) -> None:
        """Add the counts of a process of pytest-xdist."""
        self.seconds.update(getattr(node, "workeroutput", {}).get("cpu_seconds", {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the files that took a second or more."""
        total = sum(self.seconds.values())
        terminalreporter.section(f"CPU by file: {total:.0f} s in all")
        shown = [each for each in self.seconds.most_common() if each[1] >= SHOWN_S]
        for name, seconds in shown:
            terminalreporter.write_line(f"{seconds:7.1f} s  {name}")
        rest = total - sum(seconds for _, seconds in shown)
        terminalreporter.write_line(f"{rest:7.1f} s  {len(self.seconds) - len(shown)} other files")


def pytest_configure(config: pytest.Config) -> None:
    """Count in every process."""
    config.pluginmanager.register(CpuTimes(), "cpu_times")
