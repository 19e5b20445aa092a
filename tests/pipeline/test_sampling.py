import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sampling import NUM_PRIORITIES, last_priority, sampling_priority, within_speaker_cap

HOUR_MS = 3_600_000
DURATIONS = st.lists(st.integers(1, 20_000), min_size=1, max_size=60)


def priorities_of(names: list[str], seed: int = 7) -> np.ndarray:
    return np.array([sampling_priority(seed, name) for name in names], dtype=np.uint64)


def select(priorities: np.ndarray, durations_ms: np.ndarray, budget_ms: int) -> np.ndarray:
    """Whether each utterance is up to the priority that meets the budget."""
    return priorities <= np.uint64(last_priority(priorities, durations_ms, budget_ms))


def corpus(num_utterances: int, seed: int = 0) -> tuple[list[str], np.ndarray]:
    """Utterances of 0.5 to 20 s, most of them short."""
    generator = np.random.default_rng(seed)
    durations = np.clip(generator.gamma(2, 2000, num_utterances), 500, 20_000)
    return [f"utt-{seed}-{number}" for number in range(num_utterances)], durations.astype(np.int64)


@given(DURATIONS, st.integers(0, 2**64 - 1), st.data())
def test_no_order_or_partition_changes_the_selection(
    durations: list[int], seed: int, data: st.DataObject
) -> None:
    """The same utterances are selected whatever order they arrive in."""
    budget_ms = data.draw(st.integers(1, sum(durations)))
    order = data.draw(st.permutations(range(len(durations))))
    names = [f"utt-{number}" for number in range(len(durations))]
    priorities, array = priorities_of(names, seed), np.array(durations)
    chosen = select(priorities, array, budget_ms)
    permuted = select(priorities[order], array[order], budget_ms)
    assert chosen[order].tolist() == permuted.tolist()


@given(DURATIONS, st.data())
def test_the_budget_is_met_within_one_utterance(durations: list[int], data: st.DataObject) -> None:
    """The selection reaches the budget, and without its last utterance it would not."""
    budget_ms = data.draw(st.integers(1, sum(durations)))
    priorities = priorities_of([f"utt-{number}" for number in range(len(durations))])
    array = np.array(durations)
    chosen = select(priorities, array, budget_ms)
    last = np.argmax(np.where(chosen, priorities, 0))
    assert array[chosen].sum() - array[last] < budget_ms <= array[chosen].sum()


def test_selection_is_uniform() -> None:
    """Each utterance is as likely as any other: a third of the hours takes a third of each half."""
    names, durations = corpus(20_000)
    chosen = select(priorities_of(names), durations, int(durations.sum()) // 3)
    for half in (slice(None, 10_000), slice(10_000, None)):
        assert chosen[half].mean() == pytest.approx(1 / 3, abs=0.02)
    assert durations[chosen].mean() == pytest.approx(durations.mean(), rel=0.03)


def test_equal_priorities_stay_together() -> None:
    """A tie at the border cannot depend on order."""
    tied = np.array([3, 3, 9], dtype=np.uint64)
    assert select(tied, np.array([10, 10, 10]), 5).tolist() == [True, True, False]


@pytest.mark.parametrize("budget_ms", [-1, 0, HOUR_MS + 1])
def test_a_budget_beyond_what_there_is_is_refused(budget_ms: int) -> None:
    """The message names the bound."""
    with pytest.raises(ValueError, match=rf"budget = {budget_ms} ms: need 1..{HOUR_MS}"):
        last_priority(priorities_of(["a"]), np.array([HOUR_MS]), budget_ms)


def test_priority_is_a_keyed_blake2b() -> None:
    """The hash is the standard's: another implementation selects the same; seeds are 0..2^64-1."""
    for seed in (7, 2**63 - 1, 2**64 - 1):
        key = seed.to_bytes(8, "little")
        digest = hashlib.blake2b(b"utt-1", digest_size=8, key=key).digest()
        assert sampling_priority(seed, "utt-1") == int.from_bytes(digest, "little")


def test_priorities_fill_their_range() -> None:
    """Of a thousand, a hundred lie in each tenth of 0..NUM_PRIORITIES-1, within 5 deviations."""
    tenths = [
        sampling_priority(7, f"utt-{number}") * 10 // NUM_PRIORITIES for number in range(1000)
    ]
    assert np.abs(np.bincount(tenths, minlength=10) - 100).max() < 5 * np.sqrt(100)
    assert max(tenths) == 9


SPOKEN = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 20_000)), max_size=60)


@given(SPOKEN, st.integers(1, 100_000), st.data())
def test_the_cap_keeps_a_speakers_lowest_priorities(
    spoken: list[tuple[int, int]], cap_ms: int, data: st.DataObject
) -> None:
    """Each speaker's utterances by priority, up to the first that would exceed the cap."""
    speakers = np.array([speaker for speaker, _ in spoken], np.uint64)
    durations_ms = np.array([duration for _, duration in spoken], np.int64)
    priorities = priorities_of([f"utt-{number}" for number in range(len(spoken))])
    kept = within_speaker_cap(speakers, priorities, durations_ms, cap_ms)
    for speaker in range(5):
        own = np.flatnonzero(speakers == speaker)
        total_ms, expected = 0, []
        for each in own[np.argsort(priorities[own])]:
            total_ms += durations_ms[each]
            if total_ms > cap_ms:
                break
            expected.append(each)
        assert np.flatnonzero(kept & (speakers == speaker)).tolist() == sorted(expected)
    order = data.draw(st.permutations(range(len(spoken))))
    permuted = within_speaker_cap(speakers[order], priorities[order], durations_ms[order], cap_ms)
    assert permuted.tolist() == kept[order].tolist()


@given(SPOKEN, st.integers(1, 100_000), st.integers(0, 2**64 - 1))
def test_the_cap_needs_lower_priorities_only(
    spoken: list[tuple[int, int]], cap_ms: int, last: int
) -> None:
    """Capping what was drawn keeps of it what capping everything keeps of it."""
    speakers = np.array([speaker for speaker, _ in spoken], np.uint64)
    durations_ms = np.array([duration for _, duration in spoken], np.int64)
    priorities = priorities_of([f"utt-{number}" for number in range(len(spoken))])
    drawn = priorities <= np.uint64(last)
    of_all = within_speaker_cap(speakers, priorities, durations_ms, cap_ms)
    of_drawn = within_speaker_cap(speakers[drawn], priorities[drawn], durations_ms[drawn], cap_ms)
    assert of_drawn.tolist() == of_all[drawn].tolist()


def test_without_a_cap_all_are_kept() -> None:
    """0 is no bound."""
    one = np.array([1], np.uint64)
    assert within_speaker_cap(one, one, np.array([86_400_000]), 0).all()
