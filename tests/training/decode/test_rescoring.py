"""Rescored lattices, against sentences and paths one by one."""

from collections import Counter
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tests.training.decode.small_lattices import (
    BACKOFF,
    COSTS,
    START,
    WORDS,
    Ngrams,
    lattice_of_all,
    lattices,
    ngrams,
    paths_of,
)
from training.decode import rescoring
from training.decode.const_fst import ConstFst
from training.decode.decoder import FoundLattice
from training.decode.rescoring import (
    SEARCH_ARC,
    SecondPass,
    arc_posteriors,
    best_arcs,
    word_confidences,
    words_and_senones,
)

ALL_PATHS = 1e6
TABLE = ("",) * (BACKOFF + 1)


def rescored(
    lattice: np.ndarray,
    first: Ngrams,
    large: Ngrams,
    scale: float = 1.0,
    penalty: float = 0.0,
    beam: float = ALL_PATHS,
    ends_sentence: bool = True,
    **options: int,
) -> np.ndarray:
    second_pass = SecondPass(first.grammar(), large.grammar(), TABLE, scale, penalty, beam)
    return second_pass.rescored(FoundLattice(lattice, ends_sentence), **options)


def best_words(lattice: np.ndarray, words: tuple[str, ...]) -> tuple[str, ...]:
    return words_and_senones(lattice[best_arcs(lattice)], words).words


def best_cost(lattice: np.ndarray) -> float:
    path = lattice[best_arcs(lattice)]
    return float((path["graph_cost"] + path["acoustic_cost"]).sum(dtype=np.float64))


@given(
    ngrams(),
    ngrams(),
    arrays(np.float32, st.tuples(st.integers(1, 3), st.just(4)), elements=COSTS),
    st.sampled_from((0.0, 0.5, 1.0, 2.0)),
    st.sampled_from((-2.0, 0.0, 1.5)),
)
def test_best_path_is_the_best_of_all_sentences(
    first: Ngrams, large: Ngrams, spoken: np.ndarray, scale: float, penalty: float
) -> None:
    found = rescored(lattice_of_all(first, spoken), first, large, scale, penalty)
    costs: dict[tuple[int, ...], float] = {}
    for each in product((0, *WORDS), repeat=len(spoken)):
        words = tuple(word for word in each if word)
        cost = sum(spoken[range(len(each)), each]) + len(words) * penalty
        cost += scale * large.sentence_cost(words)
        costs[words] = min(cost, costs.get(words, np.inf))
    words = tuple(map(int, best_words(found, ("0", "1", "2", "3"))))
    assert best_cost(found) == costs[words] == min(costs.values())


@given(lattices(), ngrams(), ngrams(), st.sampled_from((0.5, 1.0, 2.0)), COSTS, st.booleans())
def test_all_paths_stay_at_their_new_costs(
    lattice: np.ndarray, first: Ngrams, large: Ngrams, scale: float, penalty: float, ends: bool
) -> None:
    """Those of a search that reached no final state have no </s>."""

    def after(words: tuple[int, ...], cost: float) -> float:
        before, now = (each.sentence_cost(words, ends=ends) for each in (first, large))
        return cost + scale * now - before + len(words) * penalty

    found = rescored(lattice, first, large, scale, penalty, ends_sentence=ends)
    assert Counter((p.words, p.labels, p.cost) for p in paths_of(found)) == Counter(
        (p.words, p.labels, after(p.words, p.cost)) for p in paths_of(lattice)
    )


@given(lattices(), ngrams(), COSTS)
def test_the_first_grammar_changes_nothing_but_the_beam_prunes(
    lattice: np.ndarray, first: Ngrams, beam: float
) -> None:
    paths = list(paths_of(lattice))
    limit = min(path.cost for path in paths) + beam
    found = list(paths_of(rescored(lattice, first, first, beam=beam + 1e-3)))
    # An arc stays if any path through it is within the beam, so that others may stay, too.
    within = Counter((p.words, p.labels, p.cost) for p in found if p.cost <= limit)
    assert within == Counter((p.words, p.labels, p.cost) for p in paths if p.cost <= limit)
    assert within.total() or not beam


@given(lattices(), ngrams(), ngrams())
def test_lattice_is_numbered_and_sorted(lattice: np.ndarray, first: Ngrams, large: Ngrams) -> None:
    found = rescored(lattice, first, large, beam=4.0)
    rescoring.check_lattice(found)
    states = np.arange(found["target"].max() + 1)
    assert np.array_equal(np.unique(found["source"]), states[:-1])
    assert np.array_equal(np.unique(found["target"]), states[1:])


@given(lattices(), ngrams(), st.integers(1, 30))
def test_too_many_arcs_narrow_the_beam(lattice: np.ndarray, first: Ngrams, bound: int) -> None:
    shortest = min(len(path.arcs) for path in paths_of(lattice))
    whole = rescored(lattice, first, first)
    try:
        found = rescored(lattice, first, first, max_arcs=bound)
    except ValueError as error:
        assert "too many arcs" in str(error)  # noqa: PT017
        assert bound < len(whole)
        return
    assert shortest <= len(found) <= bound
    assert best_cost(found) == best_cost(whole)
    assert (len(found) < len(whole)) == (bound < len(whole))


@given(lattices(), st.sampled_from((0.25, 1.0)))
def test_posteriors_are_shares_of_paths(lattice: np.ndarray, scale: float) -> None:
    paths = list(paths_of(lattice))
    weights = np.exp(-scale * np.array([path.cost for path in paths]))
    expected = np.zeros(len(lattice))
    for path, weight in zip(paths, weights / weights.sum(), strict=True):
        expected[list(path.arcs)] += weight
    np.testing.assert_allclose(arc_posteriors(lattice, scale), expected, atol=1e-12)


@given(lattices().filter(lambda lattice: lattice["label"].any()), st.sampled_from((0.25, 1.0)))
def test_confidence_is_the_probability_of_paths_with_the_word(
    lattice: np.ndarray, scale: float
) -> None:
    def words_there(arcs: list[tuple]) -> list[list[int]]:
        """Return the last word written at each frame, and others that are written just before."""
        found, words = [], [0]
        for _, _, label, written, _, _ in arcs:
            words = [*words, written] if written else words
            found += [words if len(words) == 1 else words[1:]] if label else []
            words = words[-1:] if label else words
        return [*found[:-1], found[-1] + words[1:]]

    rows, paths = lattice.tolist(), list(paths_of(lattice))
    weights = np.exp(-scale * np.array([path.cost for path in paths]))
    words_of = [words_there([rows[number] for number in path.arcs]) for path in paths]
    chosen = best_arcs(lattice)
    num_frames, frame, begins = len(words_of[0]), 0, []
    for number in chosen.tolist():
        begins += [(rows[number][3], min(frame, num_frames - 1))] if rows[number][3] else []
        frame += rows[number][2] > 0
    ends = [*(begin for _, begin in begins), num_frames][1:]
    expected = [
        np.mean(
            [
                weights @ [word in of_path[at] for of_path in words_of]
                for at in range(begin, max(end, begin + 1))
            ]
        )
        for (word, begin), end in zip(begins, ends[: len(begins)], strict=True)
    ]
    clipped = np.clip(np.array(expected) / weights.sum(), 1e-4, 1 - 1e-4)
    np.testing.assert_allclose(word_confidences(lattice, chosen, scale), clipped, atol=6e-5)


def test_words_written_before_one_frame_are_both_there() -> None:
    """As "a" that waits for its next phone, and "double" that is known by its first."""
    rows = [(0, 1, 1, 0), (1, 2, 0, 5), (2, 3, 2, 6), (3, 4, 0, 7), (4, 5, 0, 0)]
    lattice = np.array([(*each, 0.0, 0.0) for each in rows], SEARCH_ARC)
    np.testing.assert_array_equal(word_confidences(lattice, np.arange(5)), [0.9999] * 3)


TWO_WORDS = np.array(
    [(0, 1, 1, 1, 2.0, 1.0), (0, 1, 1, 2, 1.0, 1.0), (1, 2, 0, 0, 0.5, 0.0)], SEARCH_ARC
)


def unigrams(*words: int) -> Ngrams:
    costs: dict[tuple[int, ...], float] = {(word,): 1.0 for word in words}
    return Ngrams({**costs, (6,): 0.5}, {(): 0.0})


def test_sentences_that_the_large_grammar_lacks_are_left_out() -> None:
    found = rescored(TWO_WORDS, unigrams(1, 2), unigrams(1))
    assert best_words(found, ("", "one", "two")) == ("one",)
    assert len(found) == 2
    with pytest.raises(ValueError, match="none of its sentences: need its words"):
        rescored(TWO_WORDS, unigrams(1, 2), unigrams(3))


def test_word_that_the_first_grammar_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match="lacks a word of it: build both again"):
        rescored(TWO_WORDS, unigrams(1), unigrams(1, 2))


def broken(grammar: ConstFst, field: str, value: int) -> ConstFst:
    arrays = {"arcs": grammar.arcs.copy(), "states": grammar.states.copy()}
    name = "arcs" if field == "target" else "states"
    arrays[name][field] = value
    return replace(grammar, **arrays)


@pytest.mark.parametrize(("field", "value"), [("target", 99), ("target", -1), ("first_arc", 99)])
def test_broken_grammar_is_an_error(field: str, value: int) -> None:
    twice = np.array([(0, 1, 1, 1, 0, 0), (1, 2, 1, 1, 0, 0), (2, 3, 0, 0, 0, 0)], SEARCH_ARC)
    sound = unigrams(1, 2).grammar()
    with pytest.raises(ValueError, match="do not exist: build it again"):
        SecondPass(sound, broken(sound, field, value), TABLE, 1.0, 0.0, 1.0).rescored(
            FoundLattice(twice, ends_sentence=True)
        )


def test_grammar_that_backs_off_in_a_circle_is_an_error() -> None:
    circle = Ngrams({(START, 1): 1.0, (6,): 1.0}, {(START,): 0.0, (): 0.0}).grammar()
    arcs = circle.arcs.copy()
    arcs["target"][arcs["input_label"] == BACKOFF] = circle.start
    second_pass = SecondPass(
        unigrams(1, 2).grammar(), replace(circle, arcs=arcs), TABLE, 1.0, 0.0, 1.0
    )
    with pytest.raises(ValueError, match="do not exist: build it again"):
        second_pass.rescored(FoundLattice(TWO_WORDS, ends_sentence=True))


def test_without_a_compiler_an_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescoring, "_C", None)
    with pytest.raises(ValueError, match="install a C compiler"):
        rescored(TWO_WORDS, unigrams(1, 2), unigrams(1, 2))
