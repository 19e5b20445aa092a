"""Determinized lattices have the best path of each word sequence; shared states change no sum."""

import numpy as np
import pytest
from hypothesis import given, settings

from pipeline.shards.lattices import check_lattice
from tests.training.decode.toy_language import (
    oracle_log_likelihoods,
    senones_of,
    toy_lexicon,
    toy_tree,
)
from tests.training.decode.whole_graphs import decoding_graph, witten_bell_arpa
from tests.training.sequence_training.random_lattices import (
    NUM_SENONES,
    paths_of,
    random_lattice,
    seeds,
)
from training.decode.graph import DecodingGraph
from training.sequence_training import lattice_decoder
from training.sequence_training.lattice_decoder import (
    LatticeError,
    arcs_by_beam,
    candidate_beams,
    decode_with_reference,
    search_lattice,
)
from training.sequence_training.lattice_paths import (
    SearchArc,
    determinize,
    has_path,
    make_lattice,
    search_arcs,
    share_states,
)
from training.sequence_training.smbr import AlignedLattice, Smbr, SmbrBatch
from training.settings.decoding import LatticeConfig

TREE = toy_tree()
PLANTED = np.array(senones_of(["see", "a"], TREE))
MAX_STEPS = 10**6
WIDE = LatticeConfig(ngram_order=2, beam=1e5, lattice_beam=10.0, density=3.0)


def graph() -> DecodingGraph:
    sentences = [["see", "a"], ["a", "be"], ["see"], ["a"]]
    arpa = witten_bell_arpa(sentences, toy_lexicon().pronunciations, 2)
    return decoding_graph(toy_lexicon(), TREE, arpa)


def scores() -> np.ndarray:
    """No two alignments have the same score."""
    planted = oracle_log_likelihoods(PLANTED.tolist(), TREE.num_senones, 2.0)
    noise = np.random.default_rng(5).normal(0, 0.3, planted.shape)
    return (planted + noise).astype(np.float32)


def best_paths(raw: np.ndarray) -> dict[tuple[int, ...], tuple[float, tuple[int, ...]]]:
    """The cost and the senones of the best path of each word sequence, by all raw paths."""
    leaving: dict[int, list[SearchArc]] = {}
    for arc in search_arcs(raw):
        leaving.setdefault(arc.source, []).append(arc)
    found: dict[tuple[int, ...], tuple[float, tuple[int, ...]]] = {}
    todo: list[tuple[int, float, tuple[int, ...], tuple[int, ...]]] = [(0, 0.0, (), ())]
    while todo:
        state, cost, words, senones = todo.pop()
        if state == raw["target"].max():
            found[words] = min((cost, senones), found.get(words, (cost, senones)))
        for arc in leaving.get(state, ()):
            read = (*senones, arc.label - 1) if arc.label else senones
            said = (*words, arc.word) if arc.word else words
            todo.append((arc.target, cost + arc.cost, said, read))
    return found


def test_a_word_sequence_has_one_path() -> None:
    """That of a single word is its best, and the search's own best path is there.

    A longer sequence is lost where its words cannot begin where the pairs' best paths have them.
    """
    raw = search_lattice(graph(), scores(), WIDE)
    expected = best_paths(raw)
    arcs, costs = determinize(raw, MAX_STEPS)
    assert costs.min() == pytest.approx(0, abs=1e-9)
    lattice = make_lattice(arcs, 0, {1: 0.0})
    check_lattice(lattice, "lattice")
    kept = [path.senones for path in paths_of(lattice)]
    assert 0.75 * len(expected) < len(kept) <= len(expected)
    single = [senones for words, (_, senones) in expected.items() if len(words) == 1]
    assert len(single) > 2
    assert {*single} <= {*kept}
    assert min(expected.values())[1] in kept


def test_determinizing_takes_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lattice of too many words is refused after so many steps."""
    raw = search_lattice(graph(), scores(), WIDE)
    steps = next(steps for steps in range(0, MAX_STEPS, 100) if determinize(raw, steps))
    assert len(raw) < steps < 20 * len(raw)
    monkeypatch.setattr(lattice_decoder, "MAX_STEPS_PER_FRAME", (steps - 200) // len(PLANTED))
    with pytest.raises(LatticeError, match=r"too many words before them: lower .*lattice_beam"):
        arcs_by_beam(graph(), scores(), WIDE)


def test_a_beam_keeps_the_paths_within_it() -> None:
    """An arc's cost is that of the best path through it, beyond the best of all."""
    found = graph()
    raw = search_lattice(found, scores(), WIDE)
    arcs, costs = determinize(raw, MAX_STEPS)

    def totals(beam: float) -> list[float]:
        within = [arc for arc, cost in zip(arcs, costs, strict=True) if cost <= beam]
        lattice = make_lattice(within, 0, {1: 0.0})
        assert len(lattice.sources) == len(within) + 1  # nothing else goes; the end's arc
        frames = np.arange(len(PLANTED))
        return sorted(
            float(path.graph_cost - scores()[frames, path.senones].sum())
            for path in paths_of(lattice)
        )

    whole = totals(10.0)
    for beam in (0.5, 4.0, 8.0):
        best = [total for total in whole if total <= whole[0] + beam]
        assert totals(beam)[: len(best)] == best
    # What the search itself prunes to a beam is no other lattice.
    narrow = search_lattice(found, scores(), LatticeConfig(2, beam=1e5, lattice_beam=8.0))
    again = determinize(narrow, MAX_STEPS)
    assert np.count_nonzero(again[1] <= 8) == np.count_nonzero(costs <= 8)


@settings(deadline=None, max_examples=40)
@given(seeds)
def test_shared_states_change_no_statistic(seed: int) -> None:
    """Each senone sequence keeps the sum of its paths; so expected accuracy and gradient stay."""
    rng = np.random.default_rng(seed)
    utterance = random_lattice(rng, int(rng.integers(1, 7)))
    lattice = utterance.lattice
    shared = share_states(lattice)
    check_lattice(shared, "lattice")
    assert len(shared.sources) <= len(lattice.sources)
    sums: list[dict[tuple[int, ...], float]] = [{}, {}]
    for each, found in zip((lattice, shared), sums, strict=True):
        for path in paths_of(each):
            found[path.senones] = found.get(path.senones, 0.0) + np.exp(-path.graph_cost)
    assert sums[0].keys() == sums[1].keys()
    for senones, total in sums[0].items():
        assert sums[1][senones] == pytest.approx(total, rel=3e-4)
    criterion = Smbr(0.5, 0.1, np.log(rng.dirichlet(np.ones(NUM_SENONES))))
    frames = np.arange(len(utterance.reference))
    logits = rng.normal(0, 3, (len(frames), NUM_SENONES))
    values, gradients = [], []
    for each in (lattice, shared):
        batch = SmbrBatch.of([AlignedLattice(each, utterance.reference)], 0, criterion)
        _, output, senone = batch.cells
        value, by_cell = batch.expected_accuracies(logits[output, senone])
        gradient = np.zeros_like(logits)
        gradient[output, senone] = by_cell
        values.append(value)
        gradients.append(gradient)
    # A cost is rounded to 2^-16, so a path of six frames by less than 1e-4 of its probability.
    np.testing.assert_allclose(values[0], values[1], atol=1e-4)
    np.testing.assert_allclose(gradients[0], gradients[1], atol=1e-4)


def test_states_are_shared() -> None:
    """Words that end alike, or begin alike, have their states in common."""
    raw = search_lattice(graph(), scores(), WIDE)
    arcs, _ = determinize(raw, MAX_STEPS)
    lattice = make_lattice(arcs, 0, {1: 0.0})
    shared = share_states(lattice)
    assert shared.num_states < lattice.num_states / 2
    before, after = ({path.senones for path in paths_of(each)} for each in (lattice, shared))
    assert before == after


def test_a_density_has_its_beam() -> None:
    """Counts rise with the beam, and are those of the lattices that it makes, whatever it is."""
    found, reference = graph(), PLANTED
    counts = arcs_by_beam(found, scores(), WIDE)
    assert len(counts) == len(candidate_beams(WIDE)) == 80
    assert (np.diff(counts) >= 0).all()
    assert counts[0] >= len(PLANTED)
    assert counts[-1] > 5 * counts[0]
    for number in (0, 20, 50, 79):
        beam = float(candidate_beams(WIDE)[number])
        config = LatticeConfig(2, beam=1e5, lattice_beam=beam, density=3.0)
        made = decode_with_reference(found, scores(), config, reference)
        assert made.num_arcs == counts[number]
        assert has_path(made.lattice, reference)


def test_a_lost_reference_is_added_and_keeps_its_path() -> None:
    """Of another alignment than the search's, beside the best path."""
    found = graph()
    best = decode_with_reference(found, scores(), WIDE, PLANTED)
    assert not best.is_added
    senones = [s for s in senones_of(["see", "a"], TREE) for _ in range(2)]
    late = np.array([senones[0], *senones[:-1]])
    sure = oracle_log_likelihoods(senones, TREE.num_senones, 4.0)
    made = decode_with_reference(found, sure, WIDE, late)
    assert made.is_added
    assert has_path(made.lattice, late)
    assert has_path(made.lattice, np.array(senones))
