"""The id index names every object with an utterance, and no other, in a few reads."""

import io
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from infra.store.object_store import join_uri
from infra.task_metrics import REQUESTS
from pipeline.steps.selection.id_index import (
    IdRange,
    find_named,
    find_objects,
    named_objects,
    range_of,
)
from pipeline.steps.selection.select import metadata_uri
from tests.pipeline.steps.selection.test_select import CONFIG, record, select, write_buckets
from tests.small_corpus import local_store

HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=60)


def id_range(hashes: list[int], objects: list[int]) -> IdRange:
    return IdRange(np.array(hashes, np.uint64), np.array(objects, np.uint32))


@given(HASHES, st.integers(1, 9), st.data())
def test_ranges_hold_every_entry_once(
    hashes: list[int], num_ranges: int, data: st.DataObject
) -> None:
    """Written, read, cut and found: the objects of each hash, in order, and none of another."""
    hashes += data.draw(st.lists(st.sampled_from(hashes), max_size=20)) if hashes else []
    objects = data.draw(
        st.lists(st.integers(0, 2**32 - 1), min_size=len(hashes), max_size=len(hashes))
    )
    expected = defaultdict(list)
    for each, number in sorted(zip(hashes, objects, strict=True)):
        expected[each].append(number)
    parts = IdRange.merged(
        [id_range(hashes[::2], objects[::2]), id_range(hashes[1::2], objects[1::2])]
    )
    ranges = [part.to_bytes() for part in parts.cut(num_ranges)]
    assert sum(map(len, ranges)) == 12 * len(hashes)
    for wanted in (*expected, 0, 2**63, 2**64 - 1):
        stored = ranges[range_of(wanted, num_ranges)]
        found = find_objects(io.BytesIO(stored), len(stored), num_ranges, wanted)
        assert found == expected.get(wanted, [])
    assert all(IdRange.from_bytes(each).to_bytes() == each for each in ranges)


def test_uniform_hashes_are_found_within_one_window() -> None:
    """Of a million entries a search reads 30 hashes, all within 130 kB."""
    hashes = np.sort(np.random.default_rng(3).integers(0, 2**64, 1_000_000, np.uint64))
    stored = IdRange(hashes, np.arange(len(hashes), dtype=np.uint32)).to_bytes()
    for place in (0, 1, 500_000, 999_999):
        file = Spied(stored)
        reader = io.BufferedReader(file, buffer_size=8)
        assert find_objects(reader, len(stored), 1, int(hashes[place])) == [place]
        reads = [each for each in file.reads if each < 8 * len(hashes)]
        assert len(reads) <= 30
        assert max(reads) - min(reads) <= 130_000


class Spied(io.RawIOBase):
    """A file that remembers from where it was read."""

    mode = "rb"

    def __init__(self, data: bytes) -> None:
        self.data, self.place, self.reads = data, 0, list[int]()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, place: int, whence: int = 0, /) -> int:
        assert whence == 0
        self.place = place
        return place

    def readinto(self, buffer: Any, /) -> int:
        self.reads.append(self.place)
        some = self.data[self.place : self.place + len(buffer)]
        buffer[: len(some)] = some
        self.place += len(some)
        return len(some)


@pytest.mark.parametrize("range_bytes", [2**31, 1000])
def test_an_id_is_found_in_metadata_and_in_its_file_or_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, range_bytes: int
) -> None:
    """Selected, over the budget, twice there, refused and unknown: by one read of a range."""
    monkeypatch.setattr("pipeline.steps.selection.deduplicate._RANGE_BYTES", range_bytes)
    store, run_uri, corpus_uri = local_store(tmp_path)
    first = [record(number, number % 3) for number in range(12)]
    twice, refused = record(3, 5), {**record(99, 5), "duration_s": -1.0}
    second = [record(number, 4) for number in range(20, 30)]
    write_buckets(
        store, corpus_uri, {"00": [first[:5], first[5:]], "01": [[*second, twice, refused]]}
    )
    manifest = select(store, run_uri, corpus_uri, replace(CONFIG, hours=30 / 3600))
    assert len(manifest.id_index) == (1 if range_bytes == 2**31 else 4)
    base = metadata_uri(corpus_uri, "unlabelled")
    texts = {
        name: store.get(
            base + name if name in manifest.inputs else join_uri(run_uri, name)
        ).decode()
        for name in named_objects(manifest)
    }
    ids = [str(each["utterance_id"]) for each in (*first, *second, refused)]
    num_holders = Counter(len(find_named(store, run_uri, manifest, each)) for each in ids)
    # The budget leaves some out; one is in two metadata objects, a file and a ledger.
    assert num_holders[1] >= 5
    assert num_holders[4] == 1
    for each in (*ids, "unheard-of"):
        holders = {name for name, text in texts.items() if f'"{each}"' in text}
        before = REQUESTS.total()
        assert find_named(store, run_uri, manifest, each) == holders
        assert (REQUESTS.total() - before).get <= 1
