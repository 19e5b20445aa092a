"""Damage the objects of a finished run, kind by kind, and put them back."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from pipeline.runs.names import ALL_SUBSETS

_VARIABLE = (
    (rf"\b({'|'.join(ALL_SUBSETS)})(?=[/-])", "SUBSET"),
    (r"^models/\w+", "models/MODEL"),
    (r"^alignments/\w+", "alignments/STEP"),
    (r"^(steps)/.*", r"\1/JOB"),
    (r"^(corpus/audio)/.*", r"\1/*"),
    (r"[0-9a-f]{16}(?=\.)", "DIGEST"),
    (r"(?<=/)[0-9a-f]{2}(?=/)", "xx"),
    (r"\d+", "N"),
)


def kinds(run: Path) -> dict[str, list[str]]:
    """List the keys below a run by kind: by what is left of them without names and numbers."""
    found = defaultdict(list)
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        key = kind = path.relative_to(run).as_posix()
        for pattern, name in _VARIABLE:
            kind = re.sub(pattern, name, kind)
        found[kind].append(key)
    return dict(found)


def flipped(data: bytes) -> bytes:
    """Flip one bit in the middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@contextmanager
def replaced(run: Path, objects: Mapping[str, bytes | None]) -> Iterator[None]:
    """Give objects other bytes meanwhile; None removes one, and a new key adds one."""
    before = {run / key: (run / key).read_bytes() for key in objects if (run / key).exists()}
    for key, data in objects.items():
        if data is None:
            (run / key).unlink()
        else:
            (run / key).write_bytes(data)
    try:
        yield
    finally:
        for key in objects:
            (run / key).unlink(missing_ok=True)
        for path, data in before.items():
            path.write_bytes(data)


def folders(keys: Iterable[str]) -> set[str]:
    """Return the folders that hold objects directly."""
    return {key.rpartition("/")[0] for key in keys}
