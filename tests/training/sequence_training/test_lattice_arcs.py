"""Lattices of arcs: only whole paths stay, ordered by level, and a path can be added."""

import numpy as np
import pytest
from hypothesis import given, settings

from pipeline.shards.lattices import check_lattice
from tests.training.sequence_training.random_lattices import paths_of, random_lattice, seeds
from training.sequence_training.lattice_decoder import LatticeArc, add_path, has_path, make_lattice


def test_arcs_off_all_paths_are_left_out() -> None:
    """Dead ends and states that the start does not reach are gone; numbering does not matter."""
    arcs = [
        LatticeArc(7, 3, 1, 0.5),
        LatticeArc(7, 5, 2, 0.1),  # a dead end
        LatticeArc(9, 3, 3, 0.2),  # from nowhere
        LatticeArc(3, 4, 0, 0.25),
    ]
    lattice = make_lattice(arcs, 7, {4: 1.0})
    check_lattice(lattice, "lattice")
    (path,) = paths_of(lattice)
    assert (path.senones, path.graph_cost) == ((0,), 1.75)


def test_lattices_that_are_none_are_refused() -> None:
    """Cycles, paths of other lengths, and no way to an end are ValueErrors that say so."""
    with pytest.raises(ValueError, match="no path leads to a final state"):
        make_lattice([LatticeArc(0, 1, 1, 0.0)], 0, {2: 0.0})
    loop = [LatticeArc(0, 1, 0, 0.0), LatticeArc(1, 2, 0, 0.0), LatticeArc(2, 1, 0, 0.0)]
    with pytest.raises(ValueError, match="cycle"):
        make_lattice(loop, 0, {2: 0.0})
    with pytest.raises(ValueError, match="different numbers of frames"):
        make_lattice([LatticeArc(0, 1, 1, 0.0), LatticeArc(0, 1, 0, 0.0)], 0, {1: 0.0})


@settings(deadline=None, max_examples=30)
@given(seeds)
def test_a_path_is_added_once(seed: int) -> None:
    """All others stay as they are; a path that is there, however it got there, is not added."""
    utterance = random_lattice(np.random.default_rng(seed), 3)
    before = sorted((path.senones, path.graph_cost) for path in paths_of(utterance.lattice))
    reference = tuple(utterance.reference.tolist())
    was_there = reference in {senones for senones, _ in before}
    assert has_path(utterance.lattice, utterance.reference) == was_there
    lattice = add_path(utterance.lattice, utterance.reference, 2.5)
    check_lattice(lattice, "lattice")
    added = [] if was_there else [(reference, 2.5)]
    after = sorted((path.senones, path.graph_cost) for path in paths_of(lattice))
    assert [senones for senones, _ in after] == sorted(senones for senones, _ in [*before, *added])
    costs = [cost for _, cost in sorted([*before, *added])]
    assert [cost for _, cost in after] == pytest.approx(costs, abs=1e-5)
    assert add_path(lattice, utterance.reference, 1.0) is lattice


def test_the_smallest_lattice_is_one_arc() -> None:
    """Its end is a state of its own, behind both states of the arc."""
    lattice = make_lattice([LatticeArc(0, 1, 3, 0.5)], 0, {1: 0.25})
    check_lattice(lattice, "lattice")
    assert lattice.num_states == 3
    (path,) = paths_of(lattice)
    assert (path.senones, path.graph_cost) == ((2,), 0.75)
