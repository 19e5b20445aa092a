import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.shuffling import mixing, shuffled_order


@given(st.integers(0, 200), st.integers(), st.text(max_size=5))
def test_an_order_is_a_permutation(n: int, seed: int, key: str) -> None:
    """Every index once, the same for the same seed and key."""
    order = shuffled_order(n, seed, key)
    assert sorted(order.tolist()) == list(range(n))
    assert order.tolist() == shuffled_order(n, seed, key).tolist()


def test_the_order_never_changes_between_versions() -> None:
    """A run repeated years later reads its files in the order it did."""
    assert shuffled_order(8, 0, "files").tolist() == [5, 7, 1, 6, 0, 3, 4, 2]


@pytest.mark.parametrize("other", [(2, "a", 1), (1, "b", 1), (1, "a", 2), (1, "a"), (1, "a1")])
def test_seed_and_each_part_of_the_key_matter(other: tuple[int, str | int]) -> None:
    """Files are shuffled independently of each other."""
    assert shuffled_order(100, *other).tolist() != shuffled_order(100, 1, "a", 1).tolist()


def test_every_place_is_equally_likely() -> None:
    """Over 4000 seeds, index 0 lands on each of 8 places 500 times, within 5 deviations."""
    places = [int(np.flatnonzero(shuffled_order(8, seed) == 0)[0]) for seed in range(4000)]
    assert np.abs(np.bincount(places, minlength=8) - 500).max() < 5 * np.sqrt(500)


def test_a_uniform_order_mixes_all_files() -> None:
    """Shuffled samples of 200 files: about 200 effective files, design effect about 1.25."""
    files = np.repeat(np.arange(200), 500)[shuffled_order(100_000, 3)]
    result = mixing(files, 512, 0.1)
    assert result.effective_num_files == pytest.approx(200, rel=0.05)
    assert result.design_effect == pytest.approx(1 + 511 * 0.1 / 200, rel=0.02)


def test_files_read_one_after_another_do_not_mix() -> None:
    """Whole minibatches of one file: one effective file, the variance of clusters (Kish)."""
    result = mixing(np.repeat(np.arange(10), 512), 512, 0.1)
    assert result.effective_num_files == 1
    assert result.design_effect == pytest.approx(1 + 511 * 0.1)


def test_minibatches_of_distinct_files_are_perfect() -> None:
    """No two samples of a file together: the design effect is 1."""
    assert mixing(np.tile(np.arange(8), 4), 8, 0.5).design_effect == 1


@pytest.mark.parametrize("batch_size", [1, 11])
def test_a_minibatch_must_fit_the_samples(batch_size: int) -> None:
    """The error names the bound."""
    with pytest.raises(ValueError, match=r"need 2\.\.10"):
        mixing(np.zeros(10, dtype=np.int64), batch_size, 0.1)
