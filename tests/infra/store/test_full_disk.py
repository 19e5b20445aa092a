"""Shards and commits on a disk that is full: an error with a remedy, and nothing half written."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore, StoreError
from pipeline.records import Tally
from pipeline.runs.commit import Commit, StepContext, step_context

REMEDY = "make room, or raise the quota or ulimit -f; the same command then resumes"
SHARD = bytes(200_000)


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """Let this process write no more into a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def context(tmp_path: Path) -> StepContext:
    return step_context(ObjectStore((str(tmp_path),)), str(tmp_path), "targets/unlabelled", {}, {})


def attempt(context: StepContext, shard: bytes) -> None:
    """Store a shard and its commit, as a task does."""
    output = context.put_output("0", ".parquet", shard, Tally(1, 1))
    context.commit(Commit("0", context.fingerprint, (output,), None, Tally(1, 1), Tally()))


@pytest.mark.parametrize(
    ("shard", "limit", "name", "num_left"),
    [(SHARD, 64_000, ".parquet", 0), (b"small", 100, "commits/0.json", 1)],
    ids=["shard", "commit"],
)
def test_what_does_not_fit_is_not_committed(
    context: StepContext, shard: bytes, limit: int, name: str, num_left: int
) -> None:
    """The error names it, and nothing partial stays; the same task then succeeds, with room."""
    with file_limit(limit), pytest.raises(StoreError, match=rf"{name}: File too large: {REMEDY}"):
        attempt(context, shard)
    assert context.committed("0") is None
    assert len(context.store.list(context.run_uri)) == num_left
    assert context.store.leftovers(context.run_uri) == []
    attempt(context, shard)
    assert context.committed("0") is not None
    assert len(context.store.list(context.run_uri)) == 2


def test_an_object_that_does_not_fit_changes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old bytes stay where new ones do not fit, and an absent object stays absent."""
    store, uri = ObjectStore((str(tmp_path),)), str(tmp_path / "object")
    store.put(uri, b"old")
    with file_limit(1000):
        with pytest.raises(StoreError, match=f"object: File too large: {REMEDY}"):
            store.put(uri, bytes(2000))
        with pytest.raises(StoreError, match=f"other: File too large: {REMEDY}"):
            store.put_if_absent(f"{uri}-other", bytes(2000))
    assert store.get(uri) == b"old"
    assert not store.exists(f"{uri}-other")
    assert store.put_if_absent(f"{uri}-other", bytes(2000))

    def full(*_: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(StoreError, match=f"third: No space left on device: {REMEDY}"):
        store.put_if_absent(f"{uri}-third", b"new")
    assert store.leftovers(str(tmp_path)) == []
