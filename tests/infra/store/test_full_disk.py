"""Shards and commits on a disk that is full: an error with a remedy, and nothing half written."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore, StoreError
from tests.infra.store.full_disk import STEP, Attempt, attempt, file_limit

REMEDY = "make room, or raise the quota or ulimit -f; the same command then resumes"
UNSHARE = ("unshare", "--map-root-user", "--mount")


def require_failed(found: Attempt, folder: Path, reason: str) -> None:
    """Require an error that names the shard or the commit, and no commit and nothing partial."""
    uri, _, said = found.error.partition(": ")
    assert Path(uri).is_relative_to(folder / STEP)
    assert said == f"{reason}: {REMEDY}"
    assert not found.is_committed
    assert found.leftovers == []


def require_whole(found: Attempt) -> None:
    """Require one shard and its commit."""
    assert found.error == ""
    assert found.is_committed
    assert len(found.objects) == 2
    assert found.leftovers == []


def test_a_shard_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    """The error names the shard; the same task then succeeds, with room."""
    with file_limit(64_000):
        first = attempt(str(tmp_path))
    require_failed(first, tmp_path, "File too large")
    assert first.objects == []
    require_whole(attempt(str(tmp_path)))


def test_an_object_that_does_not_fit_changes_none(tmp_path: Path) -> None:
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


def can_mount(folder: Path) -> bool:
    """Return whether this user may mount a disk in a namespace of its own."""
    mount = (*UNSHARE, "mount", "-t", "tmpfs", "tmpfs", str(folder))
    has_program = shutil.which("unshare") is not None
    return has_program and subprocess.run(mount, check=False, capture_output=True).returncode == 0


def test_a_disk_that_is_full_commits_nothing(tmp_path: Path) -> None:
    """Neither a part of a shard, nor a shard whose commit finds no room; with room all is whole."""
    if not can_mount(tmp_path):
        pytest.skip("this machine lets its users mount no disk")
    program = (sys.executable, "-m", "tests.infra.store.full_disk", str(tmp_path))
    said = subprocess.run((*UNSHARE, *program), check=True, capture_output=True, text=True).stdout
    first, filling, last = (Attempt(**each) for each in json.loads(said))
    require_failed(first, tmp_path, "No space left on device")
    assert first.objects == []
    require_failed(filling, tmp_path, "No space left on device")
    assert len(filling.objects) == 1
    assert filling.error.partition(": ")[0].endswith("commits/000000.json")
    require_whole(last)
