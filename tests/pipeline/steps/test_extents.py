"""Extents: each reader gets its own bytes of an object, and refuses those that were altered."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.store.object_store import FetchedRange, ObjectStore, join_uri
from infra.task_metrics import REQUESTS
from pipeline.steps.hash_ranges import ENTRY_BYTES, MAX_EXTENTS, ExtentPlace, join_extents

EXTENTS = [b"first", b"", b"the third", b"\0" * 7]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ObjectStore, str]:
    """Return a store, and where an object goes; reads of damaged bytes wait for nothing."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    return ObjectStore((str(tmp_path),)), join_uri(str(tmp_path), "object")


def read(store: ObjectStore, uri: str, number: int, count: int, num_bytes: int) -> bytes:
    return ExtentPlace(uri, num_bytes, number, count).read(store)


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=12))
@settings(deadline=None)
def test_each_reader_gets_its_own_extent(extents: Sequence[bytes]) -> None:
    """Of any number and lengths, by one GET where it is empty or alone, else by two."""
    data = join_extents(extents)
    assert len(data) == ENTRY_BYTES * len(extents) + sum(map(len, extents))
    with TemporaryDirectory() as folder:
        store, uri = ObjectStore((folder,)), join_uri(folder, "object")
        store.put(uri, data)
        for number, extent in enumerate(extents):
            before = REQUESTS.total()
            assert read(store, uri, number, len(extents), len(data)) == extent
            is_one = len(extents) == 1 or not extent
            assert (REQUESTS.total() - before).get == (1 if is_one else 2)


def test_a_changed_byte_is_refused_by_its_reader(place: tuple[ObjectStore, str]) -> None:
    """Each byte of entries and extents is protected: one reader refuses it, and names the URI."""
    store, uri = place
    data = join_extents(EXTENTS)
    for changed in range(len(data)):
        store.put(uri, data[:changed] + bytes([data[changed] ^ 1]) + data[changed + 1 :])
        found = [attempt(store, uri, number, data) for number in range(len(EXTENTS))]
        (refused,) = (number for number in range(len(EXTENTS)) if found[number] != EXTENTS[number])
        said = str(found[refused])
        assert said.startswith(f"{uri}: extent {refused} of 4: ")
        assert "remove the folder scratch above it" in said


def attempt(store: ObjectStore, uri: str, number: int, data: bytes) -> bytes | str:
    """Return an extent, or what its reader says of the object."""
    try:
        return read(store, uri, number, len(EXTENTS), len(data))
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("extents", [EXTENTS, [b"alone"], [b"", b""]])
def test_a_truncated_object_is_refused(
    place: tuple[ObjectStore, str], extents: Sequence[bytes]
) -> None:
    """Whatever is left of it, by every reader; so is a longer one."""
    store, uri = place
    data = join_extents(extents)
    for other in (*(data[:length] for length in range(len(data))), data + b"\0"):
        store.put(uri, other)
        for number in range(len(extents)):
            with pytest.raises(ValueError, match=f"{uri}: .* an object of {len(other)}, .* had"):
                read(store, uri, number, len(extents), len(data))


def test_extents_of_another_object_are_refused(place: tuple[ObjectStore, str]) -> None:
    """Another number of extents, in an object of the same size."""
    store, uri = place
    data = join_extents([b"", b"\0" * ENTRY_BYTES])
    store.put(uri, join_extents([b"", b"", b""]))
    with pytest.raises(ValueError, match=f"{uri}: extent 1 of 2: the entry is of extent 1 of 3"):
        read(store, uri, 1, 2, len(data))


@pytest.mark.parametrize("count", [0, MAX_EXTENTS + 1])
def test_no_extents_and_too_many_are_refused(count: int) -> None:
    """The message has the bounds."""
    with pytest.raises(ValueError, match=rf"{count} extents .* need 1\.\.1000000"):
        join_extents([b""] * count)


@pytest.mark.parametrize(("number", "count"), [(-1, 3), (3, 3), (0, 0), (0, MAX_EXTENTS + 1)])
def test_a_number_out_of_bounds_is_refused(number: int, count: int) -> None:
    """Before anything is read."""
    with pytest.raises(ValueError, match=f"s3://b/object: extent {number} of {count}: need"):
        ExtentPlace("s3://b/object", 10**9, number, count)


@dataclass(frozen=True)
class DamagingStore(ObjectStore):
    """A store whose first answers to reads of ranges have a wrong byte."""

    num_damaged: int = 1
    answers: tuple[list[int], ...] = ([],)

    def fetch_range(self, uri: str, start: int, num_bytes: int) -> FetchedRange:
        """Read a range."""
        found = super().fetch_range(uri, start, num_bytes)
        self.answers[0].append(start)
        if len(self.answers[0]) > self.num_damaged:
            return found
        return FetchedRange(b"\1" + found.data[1:], found.object_bytes, found.etag)


@pytest.mark.parametrize("number", range(len(EXTENTS)))
def test_damage_on_the_way_is_read_again(place: tuple[ObjectStore, str], number: int) -> None:
    """Three damaged answers cost three reads more."""
    store, uri = place
    data = join_extents(EXTENTS)
    store.put(uri, data)
    damaging = DamagingStore(store.allowed_prefixes, 3, ([],))
    assert read(damaging, uri, number, len(EXTENTS), len(data)) == EXTENTS[number]
    assert len(damaging.answers[0]) == 3 + (2 if EXTENTS[number] else 1)
