"""Objects are fetched once a host, verified, and mapped by all its processes."""

import hashlib
import mmap
import multiprocessing
import os
import re
import time
from io import BufferedIOBase
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from infra import host_folder
from infra.store import host_files
from infra.store.host_files import UNUSED_AFTER_S, host_file
from infra.store.object_store import ObjectStore

NUM_BYTES = 2**25


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ObjectStore, str, str]:
    """An object, and a host without files."""
    monkeypatch.setattr(host_folder, "_TEMPORARY", tmp_path)
    data = os.urandom(NUM_BYTES)
    (tmp_path / "run").mkdir()
    uri = str(tmp_path / "run" / "graph")
    Path(uri).write_bytes(data)
    return ObjectStore((str(tmp_path / "run"),)), uri, hashlib.sha256(data).hexdigest()


def test_file_is_fetched_once(
    stored: tuple[ObjectStore, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is there is found again, in a folder and a file of the user's alone."""
    store, uri, digest = stored
    path = host_file(*stored)
    assert path.read_bytes() == store.get(uri)
    assert path.name == digest
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o400, 0o700)
    monkeypatch.setattr(host_files, "_fetch", None)
    assert host_file(*stored) == path


@pytest.mark.parametrize("damage", ["changed", "cut off", "a link", "writable by others"])
def test_damaged_or_foreign_file_is_fetched_again(
    stored: tuple[ObjectStore, str, str], tmp_path: Path, damage: str
) -> None:
    store, uri, _ = stored
    path = host_file(*stored)
    data = path.read_bytes()
    path.chmod(0o622)
    if damage == "changed":
        path.write_bytes(b"x" + data[1:])
        path.chmod(0o400)
    elif damage == "cut off":
        path.write_bytes(data[:-1])
        path.chmod(0o400)
    elif damage == "a link":
        path.unlink()
        (tmp_path / "elsewhere").write_bytes(data)
        path.symlink_to(tmp_path / "elsewhere")
    assert host_file(store, uri, path.name).read_bytes() == data
    assert not path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o400


def test_other_object_is_refused(stored: tuple[ObjectStore, str, str]) -> None:
    """Nothing of it stays."""
    store, uri, digest = stored
    with pytest.raises(ValueError, match=f"SHA-256 is {digest}, its manifest says {'0' * 64}"):
        host_file(store, uri, "0" * 64)
    assert [each.suffix for each in host_files.host_files_folder().iterdir()] == [".lock"]


@pytest.mark.parametrize("digest", ["../victim", "/tmp/victim", "0" * 63, ""])
def test_a_digest_that_is_none_names_no_file(
    stored: tuple[ObjectStore, str, str], digest: str
) -> None:
    """A manifest's digest is any text of whoever writes to the store."""
    store, uri, _ = stored
    with pytest.raises(ValueError, match="need 64 hexadecimal digits"):
        host_file(store, uri, digest)
    assert not [*host_files.host_files_folder().parent.rglob("victim*")]


def test_folder_of_others_is_refused(stored: tuple[ObjectStore, str, str], tmp_path: Path) -> None:
    (tmp_path / f"megahour-files-{os.getuid()}").mkdir(mode=0o755)
    with pytest.raises(PermissionError, match=r"need a directory that is ours alone .*: remove it"):
        host_file(*stored)


def test_unused_files_are_removed_by_a_fetch(stored: tuple[ObjectStore, str, str]) -> None:
    """Those of the last day stay, and whoever asks for one keeps it for another."""
    folder = host_files.host_files_folder()
    ages_s = {"old": UNUSED_AFTER_S + 60, "new": UNUSED_AFTER_S - 60}
    for name, age_s in ages_s.items():
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age_s,) * 2)
    path = host_file(*stored)
    names = {each.name for each in folder.iterdir()}
    assert "old" not in names
    assert {"new", path.name} <= names
    os.utime(path, (0, 0))
    assert host_file(*stored).stat().st_mtime > time.time() - 60


def test_a_file_that_is_asked_for_is_in_use_while_its_digest_is_computed(
    stored: tuple[ObjectStore, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process's fetch removes neither it nor its lock."""
    path = host_file(*stored)
    of_lock = path.with_name(f"{path.name}.lock")
    for each in (path, of_lock):
        os.utime(each, (0, 0))
    digest = host_files._digest

    def digest_beside_a_fetch(file: BufferedIOBase) -> str:
        host_files._remove_unused(path.parent)
        return digest(file)

    monkeypatch.setattr(host_files, "_digest", digest_beside_a_fetch)
    monkeypatch.setattr(host_files, "_fetch", None)
    assert host_file(*stored).exists()
    assert of_lock.exists()


def test_processes_share_what_they_map(stored: tuple[ObjectStore, str, str]) -> None:
    """Of two that have read all of a file, each has half of its pages, as the kernel counts."""
    path = host_file(*stored)
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(2)]
    processes = [
        context.Process(target=map_whole, args=(str(path), theirs), daemon=True)
        for _, theirs in pairs
    ]
    for process in processes:
        process.start()
    try:
        for ours, _ in pairs:
            assert ours.recv() == "mapped"
        for process in processes:
            assert process.pid is not None
            shares = mapped_kilobytes(process.pid, path)
            assert shares["Rss"] == NUM_BYTES // 1024
            assert shares["Pss"] <= NUM_BYTES // 2048
            assert shares["Private_Dirty"] == 0
    finally:
        for process in processes:
            process.kill()


def map_whole(path: str, connection: Connection) -> None:
    """Map a file, read all of it, and wait."""
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        assert len(hashlib.sha256(mapped).digest())
        connection.send("mapped")
        time.sleep(600)


def mapped_kilobytes(pid: int, path: Path) -> dict[str, int]:
    """Return what the kernel says of a process's map of a file."""
    text = Path(f"/proc/{pid}/smaps").read_text()
    _, _, rest = text.partition(str(path))
    lines = rest.splitlines()[1:]
    found = (re.fullmatch(r"(\w+): +(\d+) kB", line) for line in lines)
    values: dict[str, int] = {}
    for each in found:
        if each and each[1] not in values:
            values[each[1]] = int(each[2])
    return values
