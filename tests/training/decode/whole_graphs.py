"""Graphs of a whole n-gram model, in which nothing is rescored, against which lattices are held."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from io import StringIO
from typing import NamedTuple

from training.decode.arpa import read_arpa
from training.decode.const_fst import ConstFst
from training.decode.grammar import BACKOFF_WORD, ngram_grammar
from training.decode.graph import DecodingGraph, grammar_graph, word_ids
from training.decode.lexicon import Lexicon
from training.decode.ngrams import BackoffModel, arpa_text, kneser_ney, witten_bell
from training.decode.senones import SenoneTree


class GrammarWeights(NamedTuple):
    """A factor of a model's costs, and what each word costs besides."""

    scale: float = 1.0
    insertion_penalty: float = 0.0


AS_ESTIMATED = GrammarWeights()


def weighted_grammar(
    model: BackoffModel, ids: Mapping[str, int], weights: GrammarWeights
) -> ConstFst:
    """The grammar of a model whose costs are scaled, with the penalty at each word."""
    grammar = ngram_grammar(model, ids)
    arcs, states = grammar.arcs.copy(), grammar.states.copy()
    arcs["cost"] *= weights.scale
    states["final_cost"] *= weights.scale
    arcs["cost"][arcs["input_label"] != ids[BACKOFF_WORD]] += weights.insertion_penalty
    return ConstFst(grammar.start, states, arcs)


def decoding_graph(
    lexicon: Lexicon, tree: SenoneTree, arpa: str, weights: GrammarWeights = AS_ESTIMATED
) -> DecodingGraph:
    """HCLG: word sequences of an ARPA language model over the lexicon's words."""
    grammar = weighted_grammar(read_arpa(StringIO(arpa)), word_ids(lexicon), weights)
    return grammar_graph(lexicon, tree, grammar)


def kneser_ney_arpa(
    sentences: Iterable[Sequence[str]], vocabulary: Collection[str], order: int
) -> str:
    """ARPA text of the Kneser-Ney model."""
    return arpa_text(kneser_ney(sentences, vocabulary, order))


def witten_bell_arpa(
    sentences: Iterable[Sequence[str]], vocabulary: Collection[str], order: int = 3
) -> str:
    """ARPA text of the Witten-Bell model."""
    return arpa_text(witten_bell(sentences, vocabulary, order))
