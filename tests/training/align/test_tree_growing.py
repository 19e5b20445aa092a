"""Grow the phonetic decision tree: leaves partition triphones, splits gain likelihood."""

import json
from functools import reduce
from operator import add

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training.decode.toy_language import toy_lexicon, toy_speech, toy_tree
from training.align.tree_growing import (
    GaussianStatistics,
    TriphoneStatistics,
    grow_tree,
    phonetic_questions,
    triphone_statistics,
)
from training.decode.senones import PhoneAlignment, SenoneTree, parse_senone_tree
from training.settings.decoding import TreeConfig


def toy_statistics() -> tuple[np.ndarray, GaussianStatistics]:
    found = triphone_statistics(*toy_speech())
    return found.triphones, found.gaussians


def _likelihood(tree: SenoneTree) -> float:
    """Return the log-likelihood of the toy speech with one Gaussian for each senone."""
    triphones, statistics = toy_statistics()
    left, centre, right = triphones.T
    leaves = np.arange(tree.num_senones)[:, np.newaxis] == tree.table[left, centre, right]
    return float(statistics.pool(leaves.astype(float)).log_likelihoods().sum())


def test_leaves_partition_all_triphones() -> None:
    """Each triphone, seen or not, has one senone; each senone has one centre phone."""
    tree = toy_tree()
    num_phones = len(tree.phones)
    assert tree.table.shape == (num_phones,) * 3
    assert set(np.unique(tree.table)) == set(range(tree.num_senones))
    for senone in range(tree.num_senones):
        assert len({centre for _, centre, _ in np.argwhere(tree.table == senone)}) == 1
    assert len(np.unique(tree.table[:, 0])) == 1  # silence is not split


def test_every_split_gains_likelihood_and_leaves_enough_frames() -> None:
    """More senones have more likelihood, and no leaf is smaller than min_count."""
    likelihoods = [_likelihood(toy_tree(size)) for size in (9, 15, 25, 40)]
    assert min(np.diff(likelihoods)) > 0
    tree = toy_tree()
    frames = [
        np.repeat(tree.table[tuple(a.triphones.T)], a.durations) for a in toy_speech()[1].values()
    ]
    counts = np.bincount(np.concatenate(frames), minlength=tree.num_senones)
    assert tree.num_senones == 40
    assert counts.min() >= 30


def test_a_tree_is_smaller_than_asked_for_only_where_leaves_are_too_small() -> None:
    """At the bound `min_count`, each split of any leaf by one phone would leave too few frames."""
    statistics = triphone_statistics(*toy_speech())
    grown = grow_tree(statistics, toy_lexicon().phones, TreeConfig(2000, 60))
    assert grown.bound == "min_count"
    assert 40 < grown.tree.num_senones < 2000
    assert 0 < largest_smaller_side(grown.tree) < 60


def largest_smaller_side(tree: SenoneTree) -> int:
    """Return the most frames that the smaller side of any split by one phone would have."""
    triphones, statistics = toy_statistics()
    leaves = tree.table[tuple(triphones.T)]
    sides = [0]
    for leaf in set(leaves.tolist()) - {int(tree.table[0, 0, 0])}:
        own = leaves == leaf
        for side in (0, 2):
            for phone in range(len(tree.phones)):
                inside = own & (triphones[:, side] == phone)
                sizes = statistics.counts[inside].sum(), statistics.counts[own & ~inside].sum()
                sides.append(int(min(sizes)))
    return max(sides)


def test_the_bound_of_the_growth_is_named() -> None:
    """It is max_senones where the tree has as many, and else the contexts if no leaf has two."""
    phones, speech = toy_lexicon().phones, triphone_statistics(*toy_speech(2))
    assert grow_tree(speech, phones, TreeConfig(12, 30)).bound == "max_senones"
    fine = grow_tree(speech, phones, TreeConfig(2000, 1))
    assert fine.bound == "contexts"
    assert fine.tree.num_senones == np.count_nonzero(speech.triphones[:, 1]) + 1


def test_first_split_is_the_best_of_all() -> None:
    """With one more senone than phones, no other question on any phone gains more."""
    phones = toy_lexicon().phones
    roots = toy_tree(len(phones)).roots
    triphones, statistics = toy_statistics()
    centres = np.arange(len(phones))[:, np.newaxis] == triphones[:, 1]
    questions = phonetic_questions(statistics.pool(centres.astype(float)))
    best = max(
        _gain(statistics.select(rows), question[triphones[rows][:, side]])
        for rows in centres[1:]
        for question in questions
        for side in (0, 2)
    )
    gained = _likelihood(toy_tree(len(phones) + 1)) - _likelihood(SenoneTree(phones, roots))
    assert gained == pytest.approx(best, rel=1e-6)


def _gain(statistics: GaussianStatistics, inside: np.ndarray) -> float:
    sides = [statistics.select(inside), statistics.select(~inside), statistics]
    if min(sides[0].counts.sum(), sides[1].counts.sum()) < 30:
        return 0.0
    pooled = [s.pool(np.ones((1, len(s)))).log_likelihoods()[0] for s in sides]
    return float(pooled[0] + pooled[1] - pooled[2])


def test_statistics_are_those_of_the_frames() -> None:
    """Count, sum and squares of one triphone equal those of its frames, collected by hand."""
    frames, alignments = toy_speech()
    triphones, statistics = toy_statistics()
    row = int(np.argmax(statistics.counts))
    own = [
        frames[name][start : start + duration]
        for name, a in alignments.items()
        for triphone, start, duration in zip(a.triphones, a.starts, a.durations, strict=True)
        if (triphone == triphones[row]).all()
    ]
    collected = np.concatenate(own).astype(float)
    assert statistics.counts[row] == len(collected)
    np.testing.assert_allclose(statistics.sums[row], collected.sum(axis=0), rtol=1e-6)
    np.testing.assert_allclose(statistics.squares[row], (collected**2).sum(axis=0), rtol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=30, max_size=30), st.permutations(range(4)))
def test_statistics_of_parts_add_up_to_those_of_the_whole(
    parts: list[int], order: list[int]
) -> None:
    """Whatever the parts and their order: counts exactly, sums to 1e-12; so the tree is the same.

    An empty part adds nothing, and storing a part changes no bit.
    """
    frames, alignments = toy_speech()
    whole = triphone_statistics(frames, alignments)
    own = [
        triphone_statistics(
            frames,
            {name: alignments[name] for n, name in enumerate(alignments) if parts[n] == part},
        )
        for part in order
    ]
    added = reduce(add, (TriphoneStatistics.from_bytes(each.to_bytes()) for each in own))
    np.testing.assert_array_equal(added.triphones, whole.triphones)
    np.testing.assert_array_equal(added.gaussians.counts, whole.gaussians.counts)
    for name in ("sums", "squares"):
        pair = (getattr(each.gaussians, name) for each in (added, whole))
        np.testing.assert_allclose(*pair, rtol=1e-12, atol=1e-9)
    phones = toy_lexicon().phones
    trees = [grow_tree(each, phones, TreeConfig(40, 30)).tree.to_json() for each in (added, whole)]
    assert trees[0] == trees[1]


def test_a_tree_needs_statistics() -> None:
    """Without an aligned utterance there is nothing to grow on."""
    with pytest.raises(ValueError, match="no alignments: need at least one utterance"):
        grow_tree(triphone_statistics({}, {}), toy_lexicon().phones, TreeConfig(40))


def test_questions_join_phones_that_sound_alike() -> None:
    """Each of two pairs of near-equal phones becomes a question."""
    means = np.array([0.0, 5.0, 0.1, 5.1])[:, np.newaxis]
    counts = np.full(4, 100.0)
    statistics = GaussianStatistics(counts, 100 * means, 100 * (means**2 + 1))
    asked = {tuple(np.flatnonzero(question)) for question in phonetic_questions(statistics)}
    assert {(0, 2), (1, 3), (0,), (1,), (2,), (3,)} <= asked


def test_phones_that_never_occur_have_a_senone_of_their_own() -> None:
    """A phone of the lexicon that never occurs has its own senone."""
    frames = {"u": np.random.default_rng(0).normal(size=(9, 39)).astype(np.float32)}
    alignment = PhoneAlignment(np.array([0, 1], np.int32), np.array([0, 4], np.int32), 9)
    statistics = triphone_statistics(frames, {"u": alignment})
    tree = grow_tree(statistics, ("SIL", "A", "B"), TreeConfig(3)).tree
    assert len({tree.senone(0, phone, 0) for phone in range(3)}) == 3


def test_json_round_trip() -> None:
    """A written tree is read unchanged; growing it again gives the same bytes."""
    tree = toy_tree()
    assert parse_senone_tree(tree.to_json()) == tree
    assert toy_tree().to_json() == tree.to_json()


def tree_json(phones: list[str], *roots: object) -> str:
    return json.dumps({"phones": phones, "roots": roots})


def split_json(side: str, phone: int) -> dict[str, object]:
    return {"side": side, "phones": [phone], "inside": 0, "outside": 1}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"not a senone tree: TypeError.*: need what to_json writes"),
        ("{", r"not a senone tree: JSONDecodeError.*: need what to_json writes"),
        ('{"phones": []}', r"not a senone tree: KeyError\('roots'\): need what to_json writes"),
        (tree_json(["SIL"], 0, 1), r"^2 roots: need 1, one a phone"),
        (tree_json(["SIL", "A"], 0, 0), r"^senones \[0, 0\]\.\.\.: need 0\.\.n-1 once each"),
        (tree_json(["SIL", "A"], 1, 2), r"^senones \[1, 2\]\.\.\.: need 0\.\.n-1 once each"),
        (tree_json(["SIL"], "leaf"), r"^tree node leaf: need a senone or a split"),
        (tree_json(["SIL"], split_json("centre", 0)), r"^tree node .*centre.*: need a senone or a"),
        (tree_json(["SIL"], split_json("left", 7)), r"^question \[7\]: need phone ids 0\.\.0"),
        (tree_json(["SIL"], split_json("left", 1)), r"^question \[1\]: need phone ids 0\.\.0"),
        (tree_json(["SIL"], split_json("left", -1)), r"^question \[-1\]: need phone ids 0\.\.0"),
    ],
)
def test_broken_trees_are_refused(text: str, message: str) -> None:
    """Broken text is refused, and the error gives the value and what is needed."""
    with pytest.raises(ValueError, match=message):
        parse_senone_tree(text)
