"""A rescored lattice of a small graph has the best path of the large grammar's own graph."""

from itertools import product

import numpy as np
import pytest

from tests.training.decode.toy_language import (
    best_path,
    oracle_log_likelihoods,
    senones_of,
    toy_lexicon,
    toy_tree,
)
from tests.training.decode.whole_graphs import GrammarWeights, decoding_graph, kneser_ney_arpa
from training.decode.arpa import read_arpa
from training.decode.decoder import DecoderConfig, FoundLattice
from training.decode.grammar import ngram_grammar
from training.decode.rescoring import SecondPass, best_arcs, words_and_senones
from training.sequence_training.lattice_decoder import search_lattice
from training.settings.decoding import LatticeTargetsConfig

LEXICON, TREE = toy_lexicon(), toy_tree()
WORDS = sorted(LEXICON.pronunciations)
RANDOM = np.random.default_rng(5)
SENTENCES = [list(RANDOM.choice(WORDS, RANDOM.integers(1, 6))) for _ in range(60)]
SMALL = kneser_ney_arpa(SENTENCES[:15], LEXICON.pronunciations, 2)
# HCLG of a trigram may back off from a word that it lists, to less than the model's own cost.
LARGE = kneser_ney_arpa(SENTENCES, LEXICON.pronunciations, 2)


def noisy_scores(seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    senones = np.repeat(senones_of(list(random.choice(WORDS, 3)), TREE), 2).tolist()
    scores = oracle_log_likelihoods(senones, TREE.num_senones, margin=3.0)
    return (scores + random.normal(0, 2, scores.shape)).astype(np.float32)


@pytest.mark.parametrize(("scale", "penalty"), product((0.5, 2.0), (-1.0, 1.0)))
def test_rescoring_finds_what_the_large_graph_has(scale: float, penalty: float) -> None:
    """Words and senones are those of a search over HCLG of the large grammar."""
    graph = decoding_graph(LEXICON, TREE, SMALL)
    weights = GrammarWeights(scale, penalty)
    whole = decoding_graph(LEXICON, TREE, LARGE, weights)
    ids = {word: number for number, word in enumerate(graph.words)}
    first, large = (ngram_grammar(read_arpa(each.splitlines()), ids) for each in (SMALL, LARGE))
    for seed in range(6):
        scores = noisy_scores(seed)
        beams = LatticeTargetsConfig(beam=60.0, lattice_beam=25.0)
        lattice = FoundLattice(search_lattice(graph, scores, beams), ends_sentence=True)
        second_pass = SecondPass(first, large, graph.words, *weights, beam=40.0)
        found = second_pass.rescored(lattice)
        path = words_and_senones(found[best_arcs(found)], graph.words)
        expected = best_path(whole, scores, DecoderConfig(200.0, 10**6))
        assert path.words == expected.words
        assert np.array_equal(path.senones, expected.senones)
