"""Graphs over arrays: self-loops, and what a lexicon's words need to be told apart."""

import itertools
import math
from collections.abc import Iterator

import kaldifst
import numpy as np
import pytest
from hypothesis import given, settings

from tests.training.decode.test_const_fst import transducers
from training.decode.const_fst import ConstFst
from training.decode.graph import (
    LOOP_PROBABILITY,
    _disambiguation_numbers,
    add_self_loops,
    relabelled,
)

MAX_FRAMES, MAX_ARCS = 3, 4
Path = tuple[tuple[int, ...], tuple[int, ...], float]


def arcs_of_paths(fst: ConstFst, max_arcs: int) -> Iterator[tuple[list[tuple], float]]:
    """Yield the arcs, and the final cost, of each path of at most so many arcs."""
    todo: list[tuple[int, list[tuple]]] = [(fst.start, [])]
    while todo:
        state, passed = todo.pop()
        final_cost, first, num_arcs, *_ = fst.states[state].tolist()
        if math.isfinite(final_cost):
            yield passed, final_cost
        if len(passed) < max_arcs:
            todo += [(arc[3], [*passed, arc]) for arc in fst.arcs[first:][:num_arcs].tolist()]


def labels_and_cost(arcs: list[tuple], cost: float) -> Path:
    labels = tuple(arc[0] for arc in arcs if arc[0])
    return labels, tuple(arc[1] for arc in arcs if arc[1]), sum(arc[2] for arc in arcs) + cost


@settings(deadline=None, max_examples=60)
@given(transducers())
def test_labels_repeat_at_their_costs(fst: ConstFst) -> None:
    """A path that reads each of its labels for any number of frames, and no other path, is there.

    Its cost is that of the path and, for each label, of the frames after the first and of leaving.
    """
    connected = fst.to_kaldifst()
    kaldifst.connect(connected)
    fst = ConstFst.of_kaldifst(connected)
    if not len(fst.states):
        assert add_self_loops(fst) is fst
        return
    expected: list[Path] = []
    loop_cost, leave_cost = -math.log(LOOP_PROBABILITY), -math.log(1 - LOOP_PROBABILITY)
    for arcs, final_cost in arcs_of_paths(fst, MAX_ARCS):
        labels, words, cost = labels_and_cost(arcs, final_cost)
        for lasting in itertools.product(range(1, MAX_FRAMES + 1), repeat=len(labels)):
            repeats = sum(lasting) - len(labels)
            if len(arcs) + repeats <= MAX_ARCS:
                read = tuple(np.repeat(labels, lasting).tolist())
                cost_of_loops = len(labels) * leave_cost + repeats * loop_cost
                expected.append((read, words, cost + cost_of_loops))
    found = [labels_and_cost(*each) for each in arcs_of_paths(add_self_loops(fst), MAX_ARCS)]
    found = [each for each in found if max(runs(each[0]), default=0) <= MAX_FRAMES]
    expected = [each for each in expected if max(runs(each[0]), default=0) <= MAX_FRAMES]
    found, expected = sorted(found), sorted(expected)
    assert [each[:2] for each in found] == [each[:2] for each in expected]
    assert [each[2] for each in found] == pytest.approx([each[2] for each in expected], abs=1e-4)


def runs(labels: tuple[int, ...]) -> list[int]:
    """Return how long each label is read in a row."""
    return [len(list(group)) for _, group in itertools.groupby(labels)]


@given(transducers())
def test_labels_are_replaced_by_a_table(fst: ConstFst) -> None:
    table = [0, 3, 0, 2, 2, 9, 1, 0, 5, 4]
    found = relabelled(fst.to_kaldifst(), table)
    arcs = fst.arcs.copy()
    arcs["input_label"] = np.array(table)[arcs["input_label"]]
    expected = ConstFst.of(fst.sources, arcs, fst.states["final_cost"], fst.start)
    assert (found.arcs.tolist(), found.start) == (expected.arcs.tolist(), expected.start)
    assert found.states.tolist() == expected.states.tolist()


def test_only_words_that_could_be_confused_are_numbered() -> None:
    """Homophones and words that begin other words have numbers; those of equals differ."""
    spellings = [(1, 2), (1, 2), (1, 2, 3), (4,), (1,), (5, 4), (4, 6), (7,)]
    assert _disambiguation_numbers(spellings) == [1, 2, 0, 1, 1, 0, 0, 0]
