"""Build decoding graphs H o C o L o G from senones (input label senone + 1) to words.

G accepts word sequences: those of an ARPA model, or one. L reads phones and writes words, with
optional silence between them. A state may emit its senone for any number of frames. Graphs are
also written as text, AT&T's format of acceptors, for searches in other processes.

kaldilm could read ARPA too, but after its import the import of kaldi-decoder or kaldifst hangs.
"""

import gzip
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import kaldifst

from training.decode.lexicon import SILENCE_ID, Lexicon
from training.decode.ngrams import END, START, Ngram, read_arpa
from training.decode.senones import NO_WORDS, SenoneTree

EPSILON = 0


class Arc(NamedTuple):
    """Arc is one transition; `cost` is a negative natural log of a probability."""

    source: int
    target: int
    input_label: int
    output_label: int
    cost: float


def compile_transducer(
    arcs: Iterable[Arc], final_costs: Mapping[int, float], start: int = 0
) -> kaldifst.StdVectorFst:
    """Build the transducer with these arcs, sorted by output label for composition."""
    # kaldifst takes the first line's source as the start.
    ordered = sorted(arcs, key=lambda arc: arc.source != start)
    lines = [f"{a.source} {a.target} {a[2]} {a[3]} {a.cost:.6f}" for a in ordered]
    lines += [f"{state} {cost:.6f}" for state, cost in final_costs.items()]
    fst = kaldifst.compile("\n".join(lines) + "\n", acceptor=False)
    kaldifst.arcsort(fst, sort_type="olabel")
    return fst


def arcs_of(fst: kaldifst.StdVectorFst) -> Iterator[Arc]:
    """Yield every arc of a transducer."""
    for state in range(fst.num_states):
        for arc in kaldifst.ArcIterator(fst, state):
            yield Arc(state, arc.nextstate, arc.ilabel, arc.olabel, arc.weight.value)


def final_costs_of(fst: kaldifst.StdVectorFst) -> dict[int, float]:
    """Return the cost of ending in each final state."""
    costs = {state: fst.final(state).value for state in range(fst.num_states)}
    return {state: cost for state, cost in costs.items() if math.isfinite(cost)}


def relabel_inputs(
    fst: kaldifst.StdVectorFst, label: Callable[[int], int]
) -> kaldifst.StdVectorFst:
    """Replace every input label by `label(input_label)`."""
    arcs = [arc._replace(input_label=label(arc.input_label)) for arc in arcs_of(fst)]
    return compile_transducer(arcs, final_costs_of(fst), fst.start)


BACKOFF_WORD = "#0"


@dataclass(frozen=True, slots=True)
class GrammarWeights:
    """GrammarWeights: a factor of the model's costs, and what each word costs besides.

    The cost of a word, its insertion penalty, is in natural logarithms.
    """

    scale: float = 1.0
    insertion_penalty: float = 0.0


AS_ESTIMATED = GrammarWeights()


def ngram_grammar(
    arpa: str, word_ids: Mapping[str, int], weights: GrammarWeights = AS_ESTIMATED
) -> kaldifst.StdVectorFst:
    """Build the acceptor of an ARPA model: one state for each history, back-off arcs labelled #0.

    Raises ValueError for malformed text and for words that `word_ids` lacks.
    """
    entries = read_arpa(arpa, word_ids)
    order = max((len(entry.ngram) for entry in entries), default=0)
    # A state for the empty history, and for every n-gram that longer ones may continue.
    histories = [e.ngram for e in entries if len(e.ngram) < order and e.ngram[-1] != END]
    states = {history: number for number, history in enumerate(dict.fromkeys([(), *histories]))}

    def longest_history(ngram: Ngram) -> int:
        return next(states[ngram[i:]] for i in range(len(ngram) + 1) if ngram[i:] in states)

    # ARPA's log10 probabilities become OpenFst's costs in natural logarithms.
    scale = -weights.scale * math.log(10)
    arcs: list[Arc] = []
    final_costs: dict[int, float] = {}
    for entry in entries:
        *history, word = entry.ngram
        penalty = 0.0 if word == END else weights.insertion_penalty
        cost = entry.log_probability * scale + penalty
        if word == END:
            # As in Kaldi's arpa2fst, </s> is no arc: its cost ends the sentence.
            final_costs[states[tuple(history)]] = cost
        elif word != START:
            # The word leads to the longest history that the model has.
            label = word_ids[word]
            source, target = states[tuple(history)], longest_history(entry.ngram)
            arcs.append(Arc(source, target, label, label, cost))
        if entry.ngram in states:
            # A history backs off to the next shorter one.
            source, shorter = states[entry.ngram], longest_history(entry.ngram[1:])
            backoff_cost = entry.log_backoff * scale
            arcs.append(Arc(source, shorter, word_ids[BACKOFF_WORD], EPSILON, backoff_cost))
    return compile_transducer(arcs, final_costs, states.get((START,), states[()]))


SILENCE_PROBABILITY = 0.5  # before the first word, and after every word
_START, _LOOP, _SILENCE = 0, 1, 2
Labels = tuple[int, ...]


def _lexicon_transducer(
    lexicon: Lexicon,
    spoken: Lexicon,
    words: tuple[str, ...],
    labels_of: Callable[[int], Labels],
    num_labels: int,
) -> tuple[kaldifst.StdVectorFst, range]:
    """Build L of the `spoken` words, any number in a row; return the labels that disambiguate, too.

    Phone ids are those of the whole `lexicon`; labels 1..num_labels are phones. Disambiguation
    labels follow them: one for the grammar's back-off, some for homophones and words that begin
    other words, one for the end of a silence. Without them L o G cannot be determinized.
    """
    spellings = [
        (word_id, tuple(x for phone in spelled for x in labels_of(lexicon.phone_ids[phone])))
        for word_id, word in enumerate(words)
        for spelled in spoken.pronunciations.get(word, ())
    ]
    # Mohri et al. call these symbols #1, #2, ...; Kaldi's add_lex_disambig.pl numbers them so.
    numbers = _disambiguation_numbers([labels for _, labels in spellings])
    backoff, after_silence = num_labels + 1, num_labels + 2 + max(numbers, default=0)
    states = count(_SILENCE + 1)
    no_silence_cost = -math.log(1 - SILENCE_PROBABILITY)
    silence_cost = -math.log(SILENCE_PROBABILITY)
    arcs = [
        Arc(_START, _LOOP, EPSILON, EPSILON, no_silence_cost),
        Arc(_START, _SILENCE, EPSILON, EPSILON, silence_cost),
        # #0 passes through L, so that the grammar's back-off survives composition.
        Arc(_LOOP, _LOOP, backoff, words.index(BACKOFF_WORD), 0.0),
        *_chain((*labels_of(SILENCE_ID), after_silence), EPSILON, {_LOOP: 0.0}, _SILENCE, states),
    ]
    ends = {_LOOP: no_silence_cost, _SILENCE: silence_cost}
    for (word_id, spelled), number in zip(spellings, numbers, strict=True):
        labels = (*spelled, backoff + number) if number else spelled
        arcs += _chain(labels, word_id, ends, _LOOP, states)
    return compile_transducer(arcs, {_LOOP: 0.0}), range(backoff, after_silence + 1)


def _chain(
    labels: Labels, word_id: int, ends: dict[int, float], source: int, states: "count[int]"
) -> Iterator[Arc]:
    """Yield arcs that read `labels` one after the other and write the word on the first."""
    output = word_id
    for label in labels[:-1]:
        target = next(states)
        yield Arc(source, target, label, output, 0.0)
        source, output = target, EPSILON
    for end, cost in ends.items():
        yield Arc(source, end, labels[-1], output, cost)


def _disambiguation_numbers(spellings: Sequence[Labels]) -> list[int]:
    """Return 0 for a spelling that is unique and begins no other, else 1, 2, ... among equals."""
    frequency = Counter(spellings)
    beginnings = {labels[:length] for labels in frequency for length in range(1, len(labels))}
    used: Counter[Labels] = Counter()
    numbers = []
    for labels in spellings:
        used[labels] += frequency[labels] > 1 or labels in beginnings
        numbers.append(used[labels])
    return numbers


# A phone lasts 80 ms or so: 2.5 low-rate frames, or 2.7 frames of 10 ms in each of 3 states.
LOOP_PROBABILITY = 0.6


def add_self_loops(fst: kaldifst.StdVectorFst) -> kaldifst.StdVectorFst:
    """Let every input label repeat, at the cost -log(LOOP_PROBABILITY).

    A state is split until all arcs into each part have the same label, which its loop repeats.
    """
    leaving: defaultdict[int, list[Arc]] = defaultdict(list)
    for arc in arcs_of(fst):
        leaving[arc.source].append(arc)
    final_costs = final_costs_of(fst)
    loop_cost, leave_cost = -math.log(LOOP_PROBABILITY), -math.log(1 - LOOP_PROBABILITY)
    # Search from the start over pairs of a state and the label of the arc into it.
    first = (fst.start, EPSILON)
    numbers, todo = {first: 0}, [first]
    arcs: list[Arc] = []
    new_final_costs: dict[int, float] = {}
    while todo:
        state, label = todo.pop()
        source = numbers[state, label]
        cost = leave_cost if label != EPSILON else 0.0
        if label != EPSILON:
            arcs.append(Arc(source, source, label, EPSILON, loop_cost))
        for arc in leaving[state]:
            target = (arc.target, arc.input_label)
            if target not in numbers:
                numbers[target] = len(numbers)
                todo.append(target)
            arcs.append(arc._replace(source=source, target=numbers[target], cost=arc.cost + cost))
        if state in final_costs:
            new_final_costs[source] = final_costs[state] + cost
    looped = compile_transducer(arcs, new_final_costs)
    kaldifst.connect(looped)
    return looped


_DISAMBIGUATION = 1 << 20  # above every senone; disambiguation labels while minimizing


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
    words = word_table(lexicon)
    grammar = ngram_grammar(arpa, {word: number for number, word in enumerate(words)}, weights)
    return senone_graph(lexicon, lexicon, words, grammar, tree)


def alignment_graph(lexicon: Lexicon, tree: SenoneTree, words: Sequence[str]) -> DecodingGraph:
    """Build HCLG for one known word sequence; raise ValueError for words the lexicon lacks."""
    spoken, table, grammar = _transcript(lexicon, words)
    return senone_graph(lexicon, spoken, table, grammar, tree)


def monophone_graph(lexicon: Lexicon, words: Sequence[str], num_states: int) -> DecodingGraph:
    """Build the graph of one word sequence without phonetic context.

    A phone has `num_states` states in a row; state k of phone p is column `p * num_states + k`.
    """

    def states(phone: int) -> Labels:
        return tuple(phone * num_states + state + 1 for state in range(num_states))

    spoken, table, grammar = _transcript(lexicon, words)
    num_labels = len(lexicon.phones) * num_states
    transducer, _ = _lexicon_transducer(lexicon, spoken, table, states, num_labels)
    states_to_words = _determinized(kaldifst.compose(transducer, grammar))
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
    table = word_table(spoken)
    labels = map(table.index, words)
    arcs = [Arc(state, state + 1, label, label, 0.0) for state, label in enumerate(labels)]
    return spoken, table, compile_transducer(arcs, {len(words): 0.0})


def word_table(lexicon: Lexicon) -> tuple[str, ...]:
    """Return a lexicon's words by id: an empty one first, and the back-off's at last."""
    return ("<eps>", *sorted(lexicon.pronunciations), BACKOFF_WORD)


def senone_graph(
    lexicon: Lexicon,
    spoken: Lexicon,
    words: tuple[str, ...],
    grammar: kaldifst.StdVectorFst,
    tree: SenoneTree,
) -> DecodingGraph:
    """Build HCLG: the `spoken` words of a lexicon in the order of a grammar, by the tree's senones.

    Labels of the grammar are positions in the table of `words`.
    """
    if tree.phones != lexicon.phones:
        raise ValueError("the tree was grown for other phones: grow it again for this lexicon")
    transducer, disambiguation = _lexicon_transducer(
        lexicon, spoken, words, lambda phone: (phone + 1,), len(lexicon.phones)
    )
    # L o G: phones to words.
    phones_to_words = _determinized(kaldifst.compose(transducer, grammar))
    # C: windows of three phones; each window's senone becomes the input label.
    contexts, windows = kaldifst.compose_context(
        disambig_syms=list(disambiguation),
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


def encode_graph(graph: DecodingGraph) -> bytes:
    """Write the arcs, without words, as gzip of lines "source target label cost"; the start first.

    A cost has six decimal places.
    """
    arcs = sorted(arcs_of(graph.fst), key=lambda arc: arc.source != graph.fst.start)
    lines = [f"{a.source} {a.target} {a.input_label} {a.cost:.6f}" for a in arcs]
    lines += [f"{state} {cost:.6f}" for state, cost in final_costs_of(graph.fst).items()]
    # Without the time of day, so that equal graphs have equal bytes.
    return gzip.compress(("\n".join(lines) + "\n").encode(), compresslevel=6, mtime=0)


def decode_graph(data: bytes, num_senones: int) -> DecodingGraph:
    """Read what `encode_graph` wrote; the graph writes no words."""
    fst = kaldifst.compile(gzip.decompress(data).decode(), acceptor=True)
    return DecodingGraph(fst, (), num_senones)
