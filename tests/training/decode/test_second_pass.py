"""A lattice of a small model's graph, rescored, has the words of the large model's own graph."""

import numpy as np
import pytest

from tests.training.decode.toy_language import (
    best_path,
    oracle_log_likelihoods,
    senones_of,
    toy_lexicon,
    toy_tree,
)
from tests.training.decode.whole_graphs import GrammarWeights, decoding_graph, witten_bell_arpa
from training.decode.decoder import DecoderConfig, decode, find_lattice
from training.decode.grammar import ngram_grammar
from training.decode.graph import DecodingGraph, grammar_graph, word_ids
from training.decode.ngrams import witten_bell
from training.decode.rescoring import SecondPass

TREE, LEXICON = toy_tree(), toy_lexicon()
SENTENCES = [["see", "a", "cab"], ["a", "bee"], ["cabs"], ["sake", "a"]]
WIDE = DecoderConfig(1000.0, lattice_beam=60.0)
FIRST = ngram_grammar(witten_bell(SENTENCES, LEXICON.pronunciations, 1), word_ids(LEXICON))


@pytest.fixture(scope="module")
def graph() -> DecodingGraph:
    return grammar_graph(LEXICON, TREE, FIRST)


def noisy(words: list[str], seed: int) -> np.ndarray:
    """Scores of three frames a senone, which other senones often beat."""
    senones = [each for each in senones_of(words, TREE) for _ in range(3)]
    noise = np.random.default_rng(seed).normal(size=(len(senones), TREE.num_senones), scale=2)
    scores = oracle_log_likelihoods(senones, TREE.num_senones, 2.5) + noise
    return scores.astype(np.float32)


def second_pass(graph: DecodingGraph, order: int, weights: GrammarWeights) -> SecondPass:
    large = ngram_grammar(witten_bell(SENTENCES, LEXICON.pronunciations, order), word_ids(LEXICON))
    return SecondPass(FIRST, large, graph.words, *weights, beam=60.0)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("weights", [GrammarWeights(), GrammarWeights(2.0, 1.5)])
def test_rescored_words_are_those_of_the_large_models_graph(
    graph: DecodingGraph, order: int, weights: GrammarWeights
) -> None:
    """Of 20 noisy sentences each, at any scale and penalty; the models differ in some."""
    arpa = witten_bell_arpa(SENTENCES, LEXICON.pronunciations, order)
    own = decoding_graph(LEXICON, TREE, arpa, weights)
    num_changed = 0
    for seed in range(20):
        scores = noisy(SENTENCES[seed % 4], seed)
        lattice = find_lattice(graph, scores, WIDE)
        assert lattice is not None
        assert lattice.ends_sentence
        found = second_pass(graph, order, weights).hypothesis(lattice)
        expected = best_path(own, scores, WIDE)
        assert found.path.words == expected.words
        assert found.path.senones.tolist() == expected.senones.tolist()
        assert second_pass(graph, order, weights).best(lattice).words == expected.words
        assert len(found.confidences) == len(expected.words)
        assert ((found.confidences > 0) & (found.confidences < 1)).all()
        num_changed += list(expected.words) != decode(graph, scores, WIDE)
    assert (num_changed > 0) == ((order, weights) != (1, GrammarWeights()))


def test_unfinished_paths_are_rescored(graph: DecodingGraph) -> None:
    """Where no path ends a sentence, the words so far have confidences, and no </s> its cost."""
    senones = [each for each in senones_of(["see", "sake"], TREE) for _ in range(3)][:-6]
    scores = oracle_log_likelihoods(senones, TREE.num_senones, 60.0)
    lattice = find_lattice(graph, scores, DecoderConfig(5.0, lattice_beam=5.0))
    assert lattice is not None
    assert not lattice.ends_sentence
    found = second_pass(graph, 2, GrammarWeights()).hypothesis(lattice)
    assert found.path.words[:1] == ("see",)
    assert found.path.senones.tolist() == senones
    assert len(found.confidences) == len(found.path.words)


def test_speech_without_a_frame_has_no_lattice(graph: DecodingGraph) -> None:
    assert find_lattice(graph, np.zeros((0, TREE.num_senones), np.float32), WIDE) is None
