import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pipeline.steps.hash_ranges import HashRange, cut_into_ranges

HASHES = st.lists(st.integers(0, 2**64 - 1), max_size=30)


def hash_range(priorities: list[int], speakers: list[int]) -> HashRange:
    durations_ms = np.arange(1, len(priorities) + 1, dtype=np.int64)
    return HashRange(np.array(priorities, np.uint64), durations_ms, np.array(speakers, np.uint64))


@given(HASHES, HASHES)
def test_a_range_reads_back_as_written(priorities: list[int], speakers: list[int]) -> None:
    """12 bytes an utterance and 8 a speaker give all back."""
    whole = hash_range(priorities, speakers)
    data = whole.to_bytes()
    assert len(data) == 16 + 12 * len(priorities) + 8 * len(speakers)
    again = HashRange.from_bytes(data)
    for name in ("priorities", "durations_ms", "speakers"):
        np.testing.assert_array_equal(getattr(again, name), getattr(whole, name))


@given(HASHES, HASHES, st.integers(1, 50))
def test_ranges_hold_all_in_order(
    priorities: list[int], speakers: list[int], num_ranges: int
) -> None:
    """Joined, the ranges are the sorted hashes, each with its own duration."""
    whole = hash_range(priorities, speakers)
    parts = cut_into_ranges(whole.priorities, whole.durations_ms, whole.speakers, num_ranges)
    assert len(parts) == num_ranges
    joined = np.concatenate([part.priorities for part in parts])
    assert joined.tolist() == sorted(priorities)
    durations = np.concatenate([part.durations_ms for part in parts])
    assert sorted(zip(priorities, whole.durations_ms, strict=True)) == sorted(
        zip(joined, durations, strict=True)
    )
    assert np.concatenate([part.speakers for part in parts]).tolist() == sorted(speakers)


@given(st.integers(0, 2**64 - 1), HASHES, HASHES, st.integers(1, 40))
def test_every_bucket_is_cut_at_the_same_values(
    shared: int, ours: list[int], theirs: list[int], num_ranges: int
) -> None:
    """A hash is in the same range of every bucket that has it, as utterance and as speaker."""
    places = []
    for others in (ours, theirs):
        whole = hash_range([shared, *others], [*others, shared])
        parts = cut_into_ranges(whole.priorities, whole.durations_ms, whole.speakers, num_ranges)
        places.append([number for number, part in enumerate(parts) if shared in part.priorities])
        places.append([number for number, part in enumerate(parts) if shared in part.speakers])
    assert places[0] == places[1] == places[2] == places[3]
    assert len(places[0]) == 1
