"""Find the processes below a process, by Linux's /proc."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> Iterator[tuple[int, str]]:
    """Return process ids and command lines of all processes below `pid`."""
    for child in children(pid):
        with suppress(OSError):
            yield child, Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ").strip()
        yield from descendants(child)


def children(pid: int) -> list[int]:
    """Return the processes that a process has started, of all of its threads; none if it ended."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended
                found += map(int, (task / "children").read_text().split())
    return found


def lives(process_id: int) -> bool:
    """Return whether the process is alive, and not a zombie."""
    with suppress(OSError):
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False
