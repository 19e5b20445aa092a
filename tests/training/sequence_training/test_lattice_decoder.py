"""Raw lattices hold the graph's own paths and costs; references cost what the graph says."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from pipeline.shards.lattices import check_lattice
from tests.training.decode.toy_language import (
    oracle_log_likelihoods,
    senones_of,
    toy_lexicon,
    toy_tree,
)
from tests.training.decode.whole_graphs import decoding_graph, witten_bell_arpa
from tests.training.sequence_training.random_lattices import Path, paths_of, random_lattice, seeds
from training.decode import search
from training.decode.graph import DecodingGraph
from training.sequence_training import lattice_decoder
from training.sequence_training.lattice_decoder import (
    LatticeError,
    check_density,
    decode_lattice,
    reference_cost,
)
from training.sequence_training.lattice_paths import LatticeArc, add_path, has_path, make_lattice
from training.sequence_training.smbr import AlignedLattice, Smbr, SmbrBatch, smbr_loss
from training.settings.decoding import LatticeConfig

TREE = toy_tree()
WIDE = LatticeConfig(2, beam=30.0)
WITHOUT_PRUNING = LatticeConfig(2, beam=1e5, lattice_beam=1e5)
PLANTED = np.array(senones_of(["see"], TREE))


@pytest.fixture(scope="module")
def graph() -> DecodingGraph:
    sentences = [["see", "a"], ["a", "be"], ["see"]]
    arpa = witten_bell_arpa(sentences, toy_lexicon().pronunciations, 2)
    return decoding_graph(toy_lexicon(), TREE, arpa)


def graph_paths(graph: DecodingGraph, num_frames: int) -> Iterator[Path]:
    """Yield every path of the decoding graph itself that reads so many frames."""
    leaving: dict[int, list[tuple[int, int, float, int]]] = defaultdict(list)
    for source, arc in zip(graph.fst.sources.tolist(), graph.fst.arcs.tolist(), strict=True):
        leaving[source].append(arc)
    final_costs = graph.fst.states["final_cost"].tolist()
    todo: list[tuple[int, tuple[int, ...], float]] = [(graph.fst.start, (), 0.0)]
    while todo:
        state, senones, cost = todo.pop()
        if len(senones) == num_frames and math.isfinite(final_costs[state]):
            yield Path(senones, cost + final_costs[state])
        for label, _, arc_cost, target in leaving[state]:
            read = (*senones, label - 1) if label else senones
            if len(read) <= num_frames:
                todo.append((target, read, cost + arc_cost))


def test_without_pruning_the_value_is_the_whole_graphs(graph: DecodingGraph) -> None:
    """Every path of the graph is in the lattice, at its cost; so is the expected accuracy."""
    scores = oracle_log_likelihoods(PLANTED.tolist(), TREE.num_senones, 2.0)
    lattice = decode_lattice(graph, scores, WITHOUT_PRUNING)
    whole = list(graph_paths(graph, len(PLANTED)))
    found = list(paths_of(lattice))
    assert sorted(path.senones for path in found) == sorted(path.senones for path in whole)
    assert len(whole) > 100
    log_weights = [scores[range(len(PLANTED)), p.senones].sum() - p.graph_cost for p in whole]
    weights = np.exp(log_weights)
    accuracies = [np.count_nonzero(p.senones == PLANTED) for p in whole]
    batch = SmbrBatch.of(
        [AlignedLattice(lattice, PLANTED)], 0, Smbr(1.0, 0.0, np.zeros(TREE.num_senones))
    )
    loss = smbr_loss(torch.from_numpy(scores)[None], batch)
    assert -loss.item() == pytest.approx(float(weights @ accuracies / weights.sum()), rel=1e-4)


def test_beams_decide_what_competes(graph: DecodingGraph) -> None:
    """A narrower lattice is a part of a wider one; the narrowest has the best path."""
    scores = oracle_log_likelihoods(PLANTED.tolist(), TREE.num_senones, 4.0)
    sets = [
        {
            path.senones
            for path in paths_of(decode_lattice(graph, scores, replace(WIDE, lattice_beam=beam)))
        }
        for beam in (1e-3, 6.0, 12.0)
    ]
    assert sets[0] < sets[1] < sets[2]
    assert sets[0] == {tuple(PLANTED.tolist())}


def test_the_beam_is_widened_until_a_sentence_ends(graph: DecodingGraph) -> None:
    """A beam that loses every end is doubled twice; beyond that the utterance is refused."""
    # The network is sure of a word's first phone as the last, so no end is near the best state.
    senones = senones_of(["see"], TREE)[:2]
    scores = oracle_log_likelihoods(senones, TREE.num_senones, 20.0)
    with pytest.raises(LatticeError, match=r"2 frames: no path within a beam of 4 ends"):
        decode_lattice(graph, scores, LatticeConfig(2, beam=1.0, lattice_beam=1.0))
    for beam in (5.0, 60.0):
        assert (
            decode_lattice(graph, scores, LatticeConfig(2, beam=beam, lattice_beam=1.0)).num_frames
            == 2
        )


def test_dense_lattices_are_refused(graph: DecodingGraph, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand arcs a frame are allowed, one more in the utterance is not; decoding asks."""
    check_density(5000, 5)
    with pytest.raises(LatticeError, match=r"5 frames: a lattice of 5001 arcs: need at most 1000"):
        check_density(5001, 5)
    scores = oracle_log_likelihoods(PLANTED.tolist(), TREE.num_senones, 2.0)
    monkeypatch.setattr(lattice_decoder, "MAX_ARCS_PER_FRAME", 2)
    assert decode_lattice(graph, scores, replace(WIDE, lattice_beam=1e-3)).num_frames == len(
        PLANTED
    )
    with pytest.raises(LatticeError, match=r"need at most 2 a frame: lower .*lattice_beam"):
        decode_lattice(graph, scores, WITHOUT_PRUNING)
    monkeypatch.setattr(search, "MAX_LATTICE_ARCS", 10)
    with pytest.raises(LatticeError, match=r"frames: the best paths alone have more than 10 arcs"):
        decode_lattice(graph, scores, WITHOUT_PRUNING)


def test_references_cost_what_the_graph_says(graph: DecodingGraph) -> None:
    """They cost the graph's cheapest path with these senones; senones of no words are refused."""
    costs = [p.graph_cost for p in graph_paths(graph, len(PLANTED)) if p.senones == tuple(PLANTED)]
    assert reference_cost(graph, PLANTED) == pytest.approx(min(costs), abs=1e-4)
    with pytest.raises(LatticeError, match=r"4 frames: the graph has no path with the aligned"):
        reference_cost(graph, PLANTED[::-1].copy())


def test_unusable_scores_are_refused(graph: DecodingGraph) -> None:
    """No frame is the utterance's fault; NaN is the model's."""
    scores = oracle_log_likelihoods(PLANTED.tolist(), TREE.num_senones)
    with pytest.raises(LatticeError, match="0 frames"):
        decode_lattice(graph, scores[:0], WITHOUT_PRUNING)
    scores[1, 0] = np.nan
    with pytest.raises(ValueError, match="not finite"):
        decode_lattice(graph, scores, WITHOUT_PRUNING)


def test_other_senones_are_no_reference(graph: DecodingGraph) -> None:
    """has_path knows a planted path from one that differs in a frame."""
    scores = oracle_log_likelihoods(PLANTED.tolist(), TREE.num_senones, 2.0)
    lattice = decode_lattice(graph, scores, WITHOUT_PRUNING)
    assert has_path(lattice, PLANTED)
    assert not has_path(lattice, PLANTED[::-1].copy())


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
