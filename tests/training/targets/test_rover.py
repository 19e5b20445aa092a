"""ROVER: the network's alignment is as cheap as any, and votes are Fiscus's scores."""

import math
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.targets.rover import (
    INSERTION,
    LEAST,
    MOST,
    SILENT_CONFIDENCE,
    SUBSTITUTION,
    Heard,
    SlotWords,
    chosen_words,
    rover,
    slot_words,
)
from training.targets.text_normalization import Readings

TEXTS = st.lists(st.lists(st.sampled_from("abc"), max_size=5), min_size=1, max_size=3)


def cost_of(network: list[tuple[str | None, ...]], number: int) -> int:
    """What text `number` costs in slots of the texts before it."""
    cost = 0
    for slot in network:
        earlier, word = slot[:number], slot[number]
        if all(each is None for each in earlier):
            cost += 0 if word is None else INSERTION
        elif word is None:
            cost += 0 if None in earlier else INSERTION
        else:
            cost += 0 if word in earlier else SUBSTITUTION
    return cost


@given(TEXTS)
def test_each_text_is_in_the_network(texts: list[list[str]]) -> None:
    """Its words in order, each in a slot of its own; no slot is without a word."""
    network = rover(texts)
    for number, text in enumerate(texts):
        assert [slot[number] for slot in network if slot[number] is not None] == text
    assert all(len(slot) == len(texts) for slot in network)
    assert all(any(slot) for slot in network)


@given(TEXTS)
def test_no_alignment_is_cheaper(texts: list[list[str]]) -> None:
    """Against all ways, by brute force, to align the last text to the network before it."""
    network, last = rover(texts[:-1]) if len(texts) > 1 else [], texts[-1]

    @cache
    def least(slots: int, words: int) -> int:
        if slots == len(network) and words == len(last):
            return 0
        ways = []
        if slots < len(network):
            ways.append((0 if None in network[slots] else INSERTION) + least(slots + 1, words))
        if words < len(last):
            ways.append(INSERTION + least(slots, words + 1))
        if slots < len(network) and words < len(last):
            differs = 0 if last[words] in network[slots] else SUBSTITUTION
            ways.append(differs + least(slots + 1, words + 1))
        return min(ways)

    if len(texts) > 1:
        assert cost_of(rover(texts), len(texts) - 1) == least(0, 0)


def test_votes_are_shares_and_mean_scores() -> None:
    """alpha N(w) / N + (1 - alpha) C(w), of words and of their absence."""
    heard = [
        Heard([(("a",),), (("b",),)], 0.9),
        Heard([(("a",),), (("c",),)], 0.5),
        Heard([(("a",),)], 0.7),
    ]
    first, second = slot_words(heard, alpha=0.25)
    assert first.confidences == pytest.approx({("a",): 0.25 + 0.75 * 0.7})
    third = 0.25 / 3
    expected = {
        ("b",): third + 0.75 * 0.9,
        ("c",): third + 0.75 * 0.5,
        (): third + 0.75 * SILENT_CONFIDENCE,
    }
    assert second.confidences == pytest.approx(expected)
    readings = second.slot({"b", "c"}, min_confidence=0.7).readings
    assert readings.keys() == {("b",), ()}


def test_one_recognizer_keeps_its_readings() -> None:
    """Of one text nothing is voted on: alignment chooses among the ways to say it."""
    (slot,) = slot_words([Heard([(("eighteen", "oh", "three"), ("a", "b"))], 0.6)], alpha=0.5)
    assert slot.confidences == {("eighteen", "oh", "three"): 0.8, ("a", "b"): 0.8}


def test_a_reading_is_the_other_recognizers() -> None:
    """A number is read as another recognizer spelled it, or in its first way."""
    number = (("eighteen", "three"), ("one", "thousand"))
    texts = [[(("in",),), number], [(("in",),), (("one",),), (("thousand",),)]]
    assert chosen_words(texts) == [["in", "one", "thousand"]] * 2
    assert chosen_words([[number], [(("a",),)]]) == [["eighteen", "three"], ["a"]]


def test_all_readings_of_the_same_number_remain() -> None:
    """Recognizers that write 1803 alike leave to the alignment which way it is said."""
    number = (("eighteen", "three"), ("one", "thousand"))
    (slot,) = slot_words([Heard([number], 0.5), Heard([number], 0.75)], alpha=0.0)
    assert slot.confidences == {("eighteen", "three"): 0.625, ("one", "thousand"): 0.625}


def test_a_number_in_words_says_which_reading_it_is() -> None:
    """Two that write digits alike agree with a third that writes them in words."""
    number = (("eighteen", "three"), ("one", "thousand"))
    words: list[Readings] = [(("one",),), (("thousand",),)]
    slots = slot_words([Heard([number], 0.5), Heard([number], 0.5), Heard(words, 0.5)], alpha=1.0)
    assert [slot.confidences for slot in slots] == [{("one",): 1.0}, {("thousand",): 1.0}]


def test_who_heard_nothing_votes() -> None:
    """A word of one of two recognizers has half of the votes, whichever comes first."""
    word, silence = Heard([(("a",),)], 0.9), Heard([], 1.0)
    for heard in ([word, silence], [silence, word]):
        (slot,) = slot_words(heard, alpha=1.0)
        assert slot.confidences == {("a",): 0.5, (): 0.5}


@given(st.dictionaries(st.sampled_from([("a",), ("b", "c"), ()]), st.floats(0, 1), min_size=1))
def test_costs_are_probabilities(confidences: dict[tuple[str, ...], float]) -> None:
    """Those of the readings and of garbage sum to one at most; what is not known is left out."""
    words = SlotWords(confidences)
    slot = words.slot({"a", "b", "c"}, min_confidence=0.0)
    total = sum(math.exp(-cost) for cost in slot.readings.values())
    assert total + math.exp(-slot.dropping_cost) <= 1 + 1e-9
    assert LEAST <= 1 - math.exp(-slot.dropping_cost) <= MOST + 1e-9
    assert ("b", "c") not in words.slot({"a", "b"}, min_confidence=0.0).readings
    assert not any(words.slot({"a", "b", "c"}, min_confidence=1.01).readings)
