import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.shuffling import shuffle, shuffled_order


@given(st.integers(0, 200), st.integers(), st.text(max_size=5))
def test_an_order_is_a_permutation(n: int, seed: int, key: str) -> None:
    """Every index once, the same for the same seed and key."""
    order = shuffled_order(n, seed, key)
    assert sorted(order.tolist()) == list(range(n))
    assert order.tolist() == shuffled_order(n, seed, key).tolist()


def test_the_order_never_changes_between_versions() -> None:
    """A run repeated years later reads its files in the order it did."""
    assert shuffled_order(8, 0, "files").tolist() == [5, 7, 1, 6, 0, 3, 4, 2]


def test_files_are_read_in_the_order_of_that_name() -> None:
    """Eight files at seed 0, in the order of the test above."""
    assert shuffle(list("abcdefgh"), 0) == list("fhbgadec")


@pytest.mark.parametrize("other", [(2, "a", 1), (1, "b", 1), (1, "a", 2), (1, "a"), (1, "a1")])
def test_seed_and_each_part_of_the_key_matter(other: tuple[int, str | int]) -> None:
    """Files are shuffled independently of each other."""
    assert shuffled_order(100, *other).tolist() != shuffled_order(100, 1, "a", 1).tolist()


def test_every_place_is_equally_likely() -> None:
    """Over 4000 seeds, index 0 lands on each of 8 places 500 times, within 5 deviations."""
    places = [int(np.flatnonzero(shuffled_order(8, seed) == 0)[0]) for seed in range(4000)]
    assert np.abs(np.bincount(places, minlength=8) - 500).max() < 5 * np.sqrt(500)
