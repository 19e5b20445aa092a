"""Build decoding graphs H o C o L o G from senones (input label senone + 1) to words."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import kaldifst

from training.decoding.alignment import NO_WORDS
from training.decoding.graph.grammar import (
    AS_ESTIMATED,
    BACKOFF_WORD,
    GrammarWeights,
    linear_grammar,
    ngram_grammar,
)
from training.decoding.graph.lexicon_transducer import (
    Labels,
    LexiconTransducer,
    Spelling,
    lexicon_transducer,
)
from training.decoding.graph.self_loops import add_self_loops
from training.decoding.graph.transducer import EPSILON, relabel_inputs
from training.decoding.lexicon import SILENCE_ID, Lexicon
from training.decoding.senones.senone_tree import SenoneTree

_DISAMBIGUATION = 1 << 20  # above every senone; disambiguation labels while minimizing
PhoneLabels = Callable[[int], Labels]


@dataclass(frozen=True)
class DecodingGraph:
    """DecodingGraph reads column l - 1 of the scores as input label l, and writes words[w] as w."""

    fst: kaldifst.StdVectorFst
    words: tuple[str, ...]
    num_senones: int


def decoding_graph(
    lexicon: Lexicon, tree: SenoneTree, arpa: str, weights: GrammarWeights = AS_ESTIMATED
) -> DecodingGraph:
    """Build HCLG: word sequences of an ARPA language model over the lexicon's words."""
    words = _word_table(lexicon)
    grammar = ngram_grammar(arpa, {word: number for number, word in enumerate(words)}, weights)
    return _senone_graph(lexicon, lexicon, words, grammar, tree)


def alignment_graph(lexicon: Lexicon, tree: SenoneTree, words: Sequence[str]) -> DecodingGraph:
    """Build HCLG for one known word sequence; raise ValueError for words the lexicon lacks."""
    spoken, table, grammar = _transcript(lexicon, words)
    return _senone_graph(lexicon, spoken, table, grammar, tree)


def monophone_graph(lexicon: Lexicon, words: Sequence[str], num_states: int) -> DecodingGraph:
    """Build the graph of one word sequence without phonetic context.

    A phone has `num_states` states in a row; state k of phone p is column `p * num_states + k`.
    """

    def states(phone: int) -> Labels:
        return tuple(phone * num_states + state + 1 for state in range(num_states))

    spoken, table, grammar = _transcript(lexicon, words)
    num_labels = len(lexicon.phones) * num_states
    transducer = _lexicon_transducer(lexicon, spoken, table, states, num_labels)
    states_to_words = _determinized(kaldifst.compose(transducer.fst, grammar))
    plain = relabel_inputs(states_to_words, lambda label: label if label <= num_labels else EPSILON)
    return DecodingGraph(add_self_loops(plain), table, num_labels)


def _transcript(
    lexicon: Lexicon, words: Sequence[str]
) -> tuple[Lexicon, tuple[str, ...], kaldifst.StdVectorFst]:
    """Return the lexicon and table of a transcript's words, and the transcript as a grammar."""
    if not words:
        raise ValueError(NO_WORDS)
    words = lexicon.transcript(words)
    spoken = lexicon.restricted_to(words)
    table = _word_table(spoken)
    return spoken, table, linear_grammar(words, {word: i for i, word in enumerate(table)})


def _word_table(lexicon: Lexicon) -> tuple[str, ...]:
    return ("<eps>", *sorted(lexicon.pronunciations), BACKOFF_WORD)


def _lexicon_transducer(
    lexicon: Lexicon,
    spoken: Lexicon,
    words: tuple[str, ...],
    labels_of: PhoneLabels,
    num_labels: int,
) -> LexiconTransducer:
    """Build L of the `spoken` words; phone ids are those of the whole `lexicon`."""
    spellings = [
        Spelling(
            word_id, tuple(x for phone in spelled for x in labels_of(lexicon.phone_ids[phone]))
        )
        for word_id, word in enumerate(words)
        for spelled in spoken.pronunciations.get(word, ())
    ]
    return lexicon_transducer(
        spellings, labels_of(SILENCE_ID), num_labels, words.index(BACKOFF_WORD)
    )


def _senone_graph(
    lexicon: Lexicon,
    spoken: Lexicon,
    words: tuple[str, ...],
    grammar: kaldifst.StdVectorFst,
    tree: SenoneTree,
) -> DecodingGraph:
    if tree.phones != lexicon.phones:
        raise ValueError("the tree was grown for other phones: grow it again for this lexicon")
    transducer = _lexicon_transducer(
        lexicon, spoken, words, lambda phone: (phone + 1,), len(lexicon.phones)
    )
    # L o G: phones to words.
    phones_to_words = _determinized(kaldifst.compose(transducer.fst, grammar))
    # C: windows of three phones; each window's senone becomes the input label.
    contexts, windows = kaldifst.compose_context(
        disambig_syms=list(transducer.disambiguation_labels),
        context_width=3,
        central_position=1,
        ifst=phones_to_words,
    )
    labels = [_senone_label(window, tree) for window in windows]
    senones_to_words = _determinized(relabel_inputs(contexts, labels.__getitem__))
    # H: one state for each senone, with a self-loop, once the disambiguation labels are removed.
    plain = relabel_inputs(
        senones_to_words, lambda label: label if label < _DISAMBIGUATION else EPSILON
    )
    return DecodingGraph(add_self_loops(plain), words, tree.num_senones)


def _senone_label(window: list[int], tree: SenoneTree) -> int:
    """Return the input label of a context window: three phone labels, or a negative symbol.

    A phone label is 0 beyond the utterance's edges; a negative symbol disambiguates.
    """
    if len(window) == 1 and window[0] < 0:
        return _DISAMBIGUATION - window[0]
    if len(window) != 3:
        return EPSILON
    left, centre, right = (label - 1 if label else SILENCE_ID for label in window)
    return tree.senone(left, centre, right) + 1


def _determinized(fst: kaldifst.StdVectorFst) -> kaldifst.StdVectorFst:
    # Kaldi's recipe of Mohri et al.: determinize and remove epsilons, then minimize.
    kaldifst.determinize_star(fst, use_log=True)
    kaldifst.minimize_encoded(fst)
    return fst
