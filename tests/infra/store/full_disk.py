"""A task that writes its shard and commits it, on a disk that is too small first.

As a program it mounts such a disk, in a mount namespace of its own (unshare), and prints what
three attempts leave behind.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from infra.store.object_store import ObjectStore, StoreError
from pipeline.records import Tally
from pipeline.runs.commit import Commit, step_context

STEP = "targets/unlabelled"
TASK = "000000"
SHARD = bytes(200_000)


@dataclass(frozen=True)
class Attempt:
    """Attempt: the error, and what is in the store after it."""

    error: str
    is_committed: bool
    objects: list[str]
    leftovers: list[str]


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Let this process write no more into a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def attempt(folder: str, shard: bytes = SHARD) -> Attempt:
    """Store a shard and its commit."""
    store, error = ObjectStore((folder,)), ""
    context = step_context(store, folder, STEP, {}, {})
    try:
        output = context.put_output(TASK, ".parquet", shard, Tally(1, 1))
        context.commit(
            Commit(TASK, context.fingerprint, (output,), None, Tally(1, 1), quarantined=Tally())
        )
    except StoreError as failed:
        error = str(failed)
    return Attempt(
        error,
        context.committed(TASK) is not None,
        [Path(each.uri).name for each in store.list(folder)],
        [each.uri for each in store.leftovers(folder)],
    )


def main(folder: str) -> None:
    """Try on a disk of 100 kB, on one that the shard fills, then with room for all."""
    tmpfs = ("mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", folder)
    subprocess.run(tmpfs, check=True)
    attempts = [attempt(folder)]
    filling = bytes(25 * 4096)
    attempts.append(attempt(folder, filling))
    subprocess.run(("mount", "-o", "remount,size=10m", folder), check=True)
    attempts.append(attempt(folder, filling))
    print(json.dumps([asdict(each) for each in attempts]))


if __name__ == "__main__":
    main(sys.argv[1])
