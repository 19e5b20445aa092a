"""Names are compared range by range, in memory and on disk, as sets would be."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.audit import hashed_names
from pipeline.audit.hashed_names import HashedNames, names_twice, names_without
from pipeline.steps.selection.id_index import IdRange

HASHES = st.sampled_from([0, 1, 2, 3, 2**32 - 1, 2**32, 2**53 + 1, 2**63, 2**64 - 1])
OBJECTS = st.lists(st.lists(HASHES, max_size=5), max_size=5)
"""Hashes of the names in each of some objects."""


def held(objects: list[list[int]]) -> HashedNames:
    names = HashedNames()
    for place, hashes in enumerate(objects):
        names.add(np.array(hashes, np.uint64), place)
    return names


def pairs(ranges: list[IdRange]) -> list[tuple[int, int]]:
    """Each range rises, and the next one lies above it."""
    hashes = [each for found in ranges for each in found.hashes.tolist()]
    assert hashes == sorted(hashes)
    return list(zip(hashes, [p for found in ranges for p in found.objects.tolist()], strict=True))


@given(one=OBJECTS, other=OBJECTS, rows=st.integers(1, 30), a_range=st.integers(1, 30))
def test_names_are_compared_as_sets(
    one: list[list[int]], other: list[list[int]], rows: int, a_range: int
) -> None:
    """Lost, shared and doubled names, with their objects, however few are held at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashed_names, "ROWS_IN_MEMORY", rows)
        patch.setattr(hashed_names, "ROWS_A_RANGE", a_range)
        names, others = held(one), held(other)
        mine = [(each, place) for place, hashes in enumerate(one) for each in hashes]
        there = {each for hashes in other for each in hashes}
        counts = Counter(each for each, _ in mine)
        assert len(names) == len(mine)
        assert pairs(list(names.ranges(3))) == sorted(mine)
        without = pairs(list(names_without([names], [others])))
        assert sorted(without) == sorted(pair for pair in mine if pair[0] not in there)
        shared = pairs(list(names_without([names], [others], are_shared=True)))
        assert sorted(shared) == sorted(pair for pair in mine if pair[0] in there)
        twice = pairs(list(names_twice([names])))
        assert sorted(twice) == sorted(pair for pair in mine if counts[pair[0]] > 1)
        wanted = np.array([0, 5, 2**64 - 1], np.uint64)
        assert others.hold(wanted).tolist() == [0 in there, False, 2**64 - 1 in there]


def test_memory_does_not_grow_with_the_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing four times as many names takes as much memory: disk holds them."""
    monkeypatch.setattr(hashed_names, "ROWS_IN_MEMORY", 2**13)
    monkeypatch.setattr(hashed_names, "ROWS_A_RANGE", 2**14)
    random = np.random.default_rng(3)
    peaks = []
    for num_objects in (16, 64):
        tracemalloc.start()
        one, other = HashedNames(), HashedNames()
        for place in range(num_objects):
            hashes = random.integers(0, 2**64, 2**12, np.uint64)
            one.add(hashes, place)
            other.add(hashes[place == 5 :], place)
        (lost,) = [each for found in names_without([one], [other]) for each in found.objects]
        assert lost == 5
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]
