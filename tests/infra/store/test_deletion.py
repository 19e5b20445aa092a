"""A store deletes objects, and finds the files that killed writers left."""

from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore, PrefixError, join_uri


def test_many_are_deleted_and_their_neighbours_stay(base: str) -> None:
    """More than are in flight at a time, one of them twice, one that never was."""
    store = ObjectStore((base,))
    uris = [join_uri(base, f"run/{number}") for number in range(80)]
    for uri in uris:
        store.put(uri, b"1")
    store.delete_many([*uris[:70], uris[0], join_uri(base, "never/was")])
    store.delete(uris[0])
    assert [info.uri for info in store.list(base)] == sorted(uris[70:])


def test_one_that_is_refused_ends_the_deletion(base: str) -> None:
    """An object outside of the prefixes; deletions behind it that had not begun never do."""
    store = ObjectStore((base,))
    uris = [join_uri(base, f"run/{number:03d}") for number in range(100)]
    for uri in uris:
        store.put(uri, b"1")
    with pytest.raises(PrefixError):
        store.delete_many([f"{base}-elsewhere/kept", *uris])
    assert uris[-1] in [info.uri for info in store.list(base)]


def test_nothing_outside_the_prefixes_is_deleted(tmp_path: Path) -> None:
    """Deleting is confined as reading is, through links too."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"keep")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "link").symlink_to(secret)
    store = ObjectStore((str(tmp_path / "store"),))
    for uri in (str(secret), str(tmp_path / "store" / "link"), f"{tmp_path}/store/../secret"):
        with pytest.raises(PrefixError):
            store.delete(uri)
    assert secret.read_bytes() == b"keep"


def test_leftovers_are_partial_files_alone(tmp_path: Path) -> None:
    """No listing shows partial files; S3 has none."""
    store = ObjectStore((str(tmp_path),))
    store.put(str(tmp_path / "run" / "whole"), b"whole")
    (tmp_path / "run" / ".partial-01").write_bytes(b"half")
    (found,) = store.leftovers(str(tmp_path))
    assert (Path(found.uri).name, found.num_bytes) == (".partial-01", 4)
    store.delete(found.uri)
    assert store.leftovers(str(tmp_path)) == []


def test_s3_leaves_nothing(s3_bucket: str) -> None:
    """In S3 a PUT that breaks off leaves nothing."""
    store = ObjectStore((f"s3://{s3_bucket}",))
    store.put(f"s3://{s3_bucket}/run/.partial-01", b"an object as any other")
    assert store.leftovers(f"s3://{s3_bucket}/run") == []
