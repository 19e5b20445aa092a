import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sampling import (
    NUM_PRIORITIES,
    DurationStatistics,
    oversampling_threshold,
    sampling_priority,
    select_to_budget,
)

HOUR_MS = 3_600_000
DURATIONS = st.lists(st.integers(1, 20_000), min_size=1, max_size=60)


def priorities_of(names: list[str], seed: int = 7) -> np.ndarray:
    return np.array([sampling_priority(seed, name) for name in names], dtype=np.uint64)


def corpus(num_utterances: int, seed: int = 0) -> tuple[list[str], np.ndarray]:
    """Utterances of 0.5 to 20 s, most of them short."""
    generator = np.random.default_rng(seed)
    durations = np.clip(generator.gamma(2, 2000, num_utterances), 500, 20_000)
    return [f"utt-{seed}-{number}" for number in range(num_utterances)], durations.astype(np.int64)


@given(DURATIONS, st.integers(-(2**63), 2**63 - 1), st.data())
def test_no_order_or_partition_changes_the_selection(
    durations: list[int], seed: int, data: st.DataObject
) -> None:
    """The same utterances are selected whatever order they arrive in."""
    budget_ms = data.draw(st.integers(0, sum(durations)))
    order = data.draw(st.permutations(range(len(durations))))
    names = [f"utt-{number}" for number in range(len(durations))]
    priorities, array = priorities_of(names, seed), np.array(durations)
    chosen = select_to_budget(priorities, array, budget_ms)
    permuted = select_to_budget(priorities[order], array[order], budget_ms)
    assert chosen[order].tolist() == permuted.tolist()


@given(DURATIONS, st.data())
def test_the_budget_is_met_within_one_utterance(durations: list[int], data: st.DataObject) -> None:
    """The selection reaches the budget, and without its last utterance it would not."""
    budget_ms = data.draw(st.integers(1, sum(durations)))
    priorities = priorities_of([f"utt-{number}" for number in range(len(durations))])
    array = np.array(durations)
    chosen = select_to_budget(priorities, array, budget_ms)
    last = np.argmax(np.where(chosen, priorities, 0))
    assert array[chosen].sum() - array[last] < budget_ms <= array[chosen].sum()


def test_hours_are_within_a_thousandth() -> None:
    """10 of some 55 hours: 0.1 % of the budget is 36 s, an utterance at most 20 s."""
    names, durations = corpus(50_000)
    chosen = select_to_budget(priorities_of(names), durations, 10 * HOUR_MS)
    assert durations[chosen].sum() / (10 * HOUR_MS) == pytest.approx(1, abs=1e-3)


def test_selection_is_uniform() -> None:
    """Each utterance is as likely as any other: a third of the hours takes a third of each half."""
    names, durations = corpus(20_000)
    chosen = select_to_budget(priorities_of(names), durations, int(durations.sum()) // 3)
    for half in (slice(None, 10_000), slice(10_000, None)):
        assert chosen[half].mean() == pytest.approx(1 / 3, abs=0.02)
    assert durations[chosen].mean() == pytest.approx(durations.mean(), rel=0.03)


def test_a_larger_budget_keeps_the_smaller_selection() -> None:
    """Scaling a run up never drops what was selected before."""
    names, durations = corpus(1000)
    small = select_to_budget(priorities_of(names), durations, HOUR_MS // 10)
    large = select_to_budget(priorities_of(names), durations, HOUR_MS // 2)
    assert (large >= small).all()


def test_seeds_select_differently() -> None:
    """Another seed is another sample."""
    names, durations = corpus(1000)
    first = select_to_budget(priorities_of(names, 1), durations, HOUR_MS // 2)
    second = select_to_budget(priorities_of(names, 2), durations, HOUR_MS // 2)
    assert (first != second).any()


def test_a_budget_of_zero_takes_all() -> None:
    """0 hours means no budget."""
    assert select_to_budget(priorities_of(["a", "b"]), np.array([5, 6]), 0).all()


def test_equal_priorities_stay_together() -> None:
    """A tie at the border cannot depend on order."""
    tied = np.array([3, 3, 9], dtype=np.uint64)
    assert select_to_budget(tied, np.array([10, 10, 10]), 5).tolist() == [True, True, False]


def test_too_large_a_budget_names_the_hours_there_are() -> None:
    """The remedy is in the message."""
    with pytest.raises(ValueError, match=r"budget = 2\.00 h: need at most 1\.00 h"):
        select_to_budget(priorities_of(["a"]), np.array([HOUR_MS]), 2 * HOUR_MS)


def test_a_negative_budget_is_refused() -> None:
    """Less than nothing cannot be selected."""
    with pytest.raises(ValueError, match="need 0"):
        select_to_budget(priorities_of(["a"]), np.array([5]), -1)


def test_priority_is_a_keyed_blake2b() -> None:
    """The hash is the standard's: another implementation selects the same utterances."""
    digest = hashlib.blake2b(b"utt-1", digest_size=8, key=b"\x07" + bytes(7)).digest()
    assert sampling_priority(7, "utt-1") == int.from_bytes(digest, "little")


@given(st.lists(st.integers(0, 86_400_000), max_size=30), st.integers(0, 30))
def test_statistics_of_partitions_add_up(durations: list[int], cut: int) -> None:
    """Integers: the sum of partitions' statistics is exactly the whole's."""
    whole, head, tail = (
        DurationStatistics.of(np.array(part, dtype=np.int64))
        for part in (durations, durations[:cut], durations[cut:])
    )
    assert head + tail == whole


@pytest.mark.parametrize(
    ("share", "excess"), [(0.01, 0.6), (0.2, 0.15), (0.9, 0.02), (0.999, 0.002)]
)
def test_oversampling_is_enough_and_mild(share: float, excess: float) -> None:
    """Candidates exceed the budget in all of 20 draws; the excess shrinks with the budget."""
    names, durations = corpus(50_000)
    budget_ms = int(durations.sum() * share)
    threshold = oversampling_threshold(DurationStatistics.of(durations), budget_ms)
    for seed in range(20):
        draws = np.random.default_rng(seed).integers(0, NUM_PRIORITIES, len(names), dtype=np.uint64)
        candidates = durations[draws < threshold] if threshold < NUM_PRIORITIES else durations
        assert budget_ms <= candidates.sum() < budget_ms * (1 + excess)


@pytest.mark.parametrize("share", [0.05, 0.5])
def test_oversampling_changes_nothing_but_the_work(share: float) -> None:
    """Selecting among the candidates selects what selecting among all does."""
    names, durations = corpus(20_000)
    priorities, budget_ms = priorities_of(names), int(durations.sum() * share)
    candidates = priorities < oversampling_threshold(DurationStatistics.of(durations), budget_ms)
    among_all = select_to_budget(priorities, durations, budget_ms)
    among_few = select_to_budget(priorities[candidates], durations[candidates], budget_ms)
    assert np.flatnonzero(among_all).tolist() == np.flatnonzero(candidates)[among_few].tolist()


@pytest.mark.parametrize("budget_ms", [0, 11, 100])
def test_without_room_to_sample_all_are_candidates(budget_ms: int) -> None:
    """No budget, or one as large as the corpus: the threshold excludes nothing."""
    statistics = DurationStatistics.of(np.array([5, 6]))
    assert oversampling_threshold(statistics, budget_ms) == NUM_PRIORITIES
