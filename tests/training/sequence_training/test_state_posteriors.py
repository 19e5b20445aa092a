"""State posteriors are those of every path; mixed with the teacher's they fill the k-best store."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax, softmax

from pipeline.kbest import check_kbest, retained_mass, select_kbest, soft_targets
from tests.training.decode.toy_language import (
    oracle_log_likelihoods,
    senones_of,
    toy_lexicon,
    toy_tree,
)
from tests.training.decode.whole_graphs import decoding_graph
from tests.training.sequence_training.random_lattices import (
    NUM_SENONES,
    paths_of,
    random_lattice,
    seeds,
)
from tests.training.sequence_training.test_lattice_decoder import graph_paths
from training.decode.graph import alignment_graph
from training.models.losses import kbest_cross_entropy
from training.sequence_training.forward_backward import (
    StatePosteriors,
    interpolated_kbest,
    state_posteriors,
)
from training.sequence_training.lattice_decoder import decode_lattice
from training.sequence_training.lattice_paths import LatticeArc, make_lattice
from training.settings.decoding import LatticeConfig

ONE_WORD = """\
\\data\\
ngram 1=3
ngram 2=2

\\1-grams:
-99 <s> -99
-99 </s>
-99 see -99

\\2-grams:
0 <s> see
0 see </s>

\\end\\
"""
"""An ARPA of one sentence, "see", whose probability is 1."""


def dense(found: StatePosteriors, num_frames: int, num_senones: int) -> np.ndarray:
    matrix = np.zeros((num_frames, num_senones))
    matrix[found.frames, found.senones] = found.probabilities
    return matrix


def enumerated(paths: list, scores: np.ndarray) -> np.ndarray:
    """Add each path's probability at its senones, path by path."""
    frames = np.arange(len(scores))
    log_weights = [scores[frames, list(p.senones)].sum() - p.graph_cost for p in paths]
    weights = np.exp(np.array(log_weights) - max(log_weights))
    posteriors = np.zeros_like(scores)
    for path, weight in zip(paths, weights / weights.sum(), strict=True):
        posteriors[frames, list(path.senones)] += weight
    return posteriors


@settings(deadline=None, max_examples=40)
@given(seeds, st.integers(1, 5))
def test_state_posteriors_are_those_of_all_paths(seed: int, num_frames: int) -> None:
    """Within 1e-9 of the enumeration; each frame's sum to one; a pair of frame and senone once."""
    rng = np.random.default_rng(seed)
    lattice = random_lattice(rng, num_frames).lattice
    scores = rng.normal(0, 3, (num_frames, NUM_SENONES))
    found = state_posteriors(lattice, scores)
    matrix = dense(found, num_frames, NUM_SENONES)
    np.testing.assert_allclose(matrix, enumerated(list(paths_of(lattice)), scores), atol=1e-9)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-12)
    cells = found.frames * NUM_SENONES + found.senones
    assert (np.diff(cells) > 0).all()


def test_one_word_gives_its_forced_alignments_posteriors() -> None:
    """With a language model of one sentence, the search is the forced alignment's, path by path."""
    tree, lexicon = toy_tree(), toy_lexicon()
    planted = senones_of(["see"], tree)
    scores = oracle_log_likelihoods([planted[0], *planted, planted[-1]], tree.num_senones, 2.0)
    decoded = decode_lattice(
        decoding_graph(lexicon, tree, ONE_WORD),
        scores,
        LatticeConfig(2, beam=1e5, lattice_beam=1e5),
    )
    found = dense(state_posteriors(decoded, scores), len(scores), tree.num_senones)
    forced = list(graph_paths(alignment_graph(lexicon, tree, ["see"]), len(scores)))
    assert len(forced) > 20
    # kaldifst prints six digits of a cost.
    np.testing.assert_allclose(found, enumerated(forced, scores.astype(float)), atol=1e-5)
    assert (found.max(axis=1) < 1).any()


def drawn(seed: int) -> tuple[np.ndarray, StatePosteriors]:
    rng = np.random.default_rng(seed)
    lattice = random_lattice(rng, 5).lattice
    logits = rng.normal(0, 2, (5, NUM_SENONES)).astype(np.float32)
    return logits, state_posteriors(lattice, logits)


@pytest.mark.parametrize("seed", range(3))
def test_weight_0_keeps_the_logits_own_bits(seed: int) -> None:
    """Senones, logits and log Z are those of select_kbest, byte by byte."""
    logits, found = drawn(seed)
    mixed, own = interpolated_kbest(logits, found, 0.0, 3), select_kbest(logits, 3)
    for name in ("senones", "logits", "log_z"):
        assert getattr(mixed, name).tobytes() == getattr(own, name).tobytes()


@pytest.mark.parametrize("weight", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("k", [2, NUM_SENONES])
def test_targets_are_the_mean_of_two_distributions(weight: float, k: int) -> None:
    """The k best of (1 - weight) p + weight gamma; the mass is exact; absent ones have none."""
    logits, found = drawn(7)
    expected = (1 - weight) * softmax(logits, axis=1) + weight * dense(found, 5, NUM_SENONES)
    kbest = interpolated_kbest(logits, found, weight, k)
    check_kbest(kbest, "targets")
    kept = np.take_along_axis(expected, kbest.senones.astype(int), axis=1)
    best = -np.sort(-expected, axis=1)[:, :k]
    np.testing.assert_allclose(kept, best, atol=1e-7)
    np.testing.assert_allclose(retained_mass(kbest), best.sum(axis=1), atol=2e-3)
    np.testing.assert_allclose(
        soft_targets(kbest), kept / kept.sum(axis=1, keepdims=True), atol=2e-3
    )
    assert (soft_targets(kbest)[kept == 0] == 0).all()
    assert weight < 1 or (kept == 0).any() or k == 2


def test_absent_senones_have_no_loss_and_are_pushed_down() -> None:
    """Loss and gradient are a hard label's where one senone of four is probable."""
    lattice = make_lattice([LatticeArc(0, 1, 3, 0.0)], 0, {1: 0.0})
    logits = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    kbest = interpolated_kbest(logits, state_posteriors(lattice, logits), 1.0, 3)
    student = torch.zeros(1, 1, 4, requires_grad=True)
    loss = kbest_cross_entropy(
        student,
        torch.from_numpy(kbest.senones.astype(np.int64))[None],
        torch.from_numpy(soft_targets(kbest))[None],
    )
    loss.backward()
    assert loss.item() == pytest.approx(-log_softmax(np.zeros(4))[2])
    assert student.grad is not None
    assert student.grad.flatten().tolist() == pytest.approx([0.25, 0.25, -0.75, 0.25])


def test_the_tail_is_drawn_from_the_mixed_posteriors() -> None:
    """The mean of 1,000 seeds is the mixture within five standard errors of each senone."""
    logits, found = drawn(7)
    expected = 0.5 * softmax(logits, axis=1) + 0.5 * dense(found, 5, NUM_SENONES)
    stored = np.zeros((1000, 5, NUM_SENONES))
    for seed, each in enumerate(stored):
        kbest = interpolated_kbest(logits, found, 0.5, 2, 1, seed)
        np.add.at(each, (np.arange(5)[:, np.newaxis], kbest.senones), soft_targets(kbest))
    bound = 5 * stored.std(axis=0) / np.sqrt(len(stored)) + 1e-3
    assert (np.abs(stored.mean(axis=0) - expected) <= bound).all()
