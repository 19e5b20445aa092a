"""Draw small grammars and lattices, and list what they hold path by path."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from training.decode.const_fst import ARC, ConstFst
from training.decode.rescoring import SEARCH_ARC

WORDS = (1, 2, 3)
BACKOFF, START, END = 4, 5, 6

COSTS = st.integers(0, 255).map(lambda number: number / 16)
"""Sums of a few of these are exact in float32."""

Ngram = tuple[int, ...]


@dataclass(frozen=True)
class Ngrams:
    """Ngrams of at most three words: their costs, and the back-off costs of histories."""

    costs: Mapping[Ngram, float]
    backoffs: Mapping[Ngram, float]

    def cost_of(self, history: Ngram, word: int) -> float:
        """Return the cost of a word, or of END, after all words before it."""
        history = history[-2:]
        if (*history, word) in self.costs:
            return self.costs[*history, word]
        return self.backoffs.get(history, 0.0) + self.cost_of(history[1:], word)

    def sentence_cost(self, words: Ngram, *, ends: bool = True) -> float:
        """Return the cost of a sentence, or of one that may go on."""
        history, cost = (START,), 0.0
        for word in (*words, END) if ends else words:
            cost += self.cost_of(history, word)
            history = (*history, word)
        return cost

    def grammar(self) -> ConstFst:
        """Return the acceptor, with a state for each history that backs off."""
        states = {history: number for number, history in enumerate(self.backoffs)}
        sources, arcs, finals = [], [], np.full(len(states), np.inf, np.float32)

        def longest(history: Ngram) -> int:
            return next(states[history[n:]] for n in range(4) if history[n:] in states)

        for (*history, word), cost in self.costs.items():
            source = states[tuple(history)]
            if word == END:
                finals[source] = cost
            else:
                sources.append(source)
                arcs.append((word, word, cost, longest((*history, word))))
        for history, cost in self.backoffs.items():
            if history:
                sources.append(states[history])
                arcs.append((BACKOFF, 0, cost, longest(history[1:])))
        start = longest((START,))
        return ConstFst.of(np.array(sources, np.int32), np.array(arcs, ARC), finals, start)


@st.composite
def ngrams(draw: st.DrawFn) -> Ngrams:
    """Draw a model that has all words as unigrams."""
    costs = {(word,): draw(COSTS) for word in (*WORDS, END)}
    pairs = list(product((*WORDS, START), (*WORDS, END)))
    for pair in draw(st.lists(st.sampled_from(pairs), unique=True)):
        costs[pair] = draw(COSTS)
    longer = [(*pair, word) for pair in pairs if pair in costs for word in (*WORDS, END)]
    longer = [ngram for ngram in longer if END not in ngram[:-1]]
    if longer:
        for ngram in draw(st.lists(st.sampled_from(longer), unique=True, max_size=9)):
            costs[ngram] = draw(COSTS)
    histories = dict.fromkeys([(), *(ngram[:-1] for ngram in costs)])
    return Ngrams(costs, {history: draw(COSTS) if history else 0.0 for history in histories})


class Path(NamedTuple):
    """Path: words, labels, and the cost; `arcs` are numbers in the lattice."""

    words: Ngram
    labels: Ngram
    cost: float
    arcs: tuple[int, ...]


def paths_of(lattice: np.ndarray) -> Iterator[Path]:
    """Yield every path from state 0 to the last one."""
    end = lattice["target"].max()
    rows = lattice.tolist()

    def onwards(state: int) -> Iterator[tuple[int, ...]]:
        if state == end:
            yield ()
        for number, (source, target, *_) in enumerate(rows):
            if source == state:
                for rest in onwards(target):
                    yield (number, *rest)

    for arcs in onwards(0):
        chosen = [rows[number] for number in arcs]
        yield Path(
            tuple(word for _, _, _, word, _, _ in chosen if word),
            tuple(label for _, _, label, _, _, _ in chosen if label),
            sum(graph_cost + acoustic_cost for *_, graph_cost, acoustic_cost in chosen),
            arcs,
        )


@st.composite
def lattices(draw: st.DrawFn) -> np.ndarray:
    """Draw a lattice of a few frames, in which all states are on paths."""
    sizes = [1, *draw(st.lists(st.integers(1, 2), min_size=1, max_size=4)), 1]
    firsts = np.cumsum([0, *sizes])
    arcs = []
    for level in range(len(sizes) - 1):
        is_end = level == len(sizes) - 2
        sources = range(firsts[level], firsts[level + 1])
        targets = range(firsts[level + 1], firsts[level + 2])
        # One arc or more from each state, and to each state.
        pairs = [(source, draw(st.sampled_from(targets))) for source in sources]
        pairs += [(draw(st.sampled_from(sources)), target) for target in targets]
        pairs += draw(st.lists(st.sampled_from(list(product(sources, targets))), max_size=2))
        reads = not is_end and draw(st.sampled_from((True, True, False)))
        for source, target in pairs:
            label = draw(st.integers(1, 3)) if reads else 0
            word = 0 if is_end else draw(st.sampled_from((0, *WORDS)))
            acoustic_cost = draw(COSTS) if reads else 0.0
            arcs.append((source, target, label, word, draw(COSTS), acoustic_cost))
    return np.array(sorted(arcs), SEARCH_ARC)


def lattice_of_all(first: Ngrams, spoken: np.ndarray) -> np.ndarray:
    """Return a lattice in which each frame has any word, or none, at the cost of `first`.

    Element [t, w] of `spoken` is the acoustic cost of word w at frame t.
    """
    numbers: dict[tuple[int, Ngram], int] = {(0, (START,)): 0}
    arcs, end = [], len(spoken)
    for frame in range(end):
        for (at, history), source in list(numbers.items()):
            if at != frame:
                continue
            for word in (0, *WORDS):
                after = (*history, word)[-2:] if word else history
                target = numbers.setdefault((frame + 1, after), len(numbers))
                graph_cost = first.cost_of(history, word) if word else 0.0
                arcs.append((source, target, 1, word, graph_cost, spoken[frame, word]))
    last = len(numbers)
    for (at, history), source in numbers.items():
        if at == end:
            arcs.append((source, last, 0, 0, first.cost_of(history, END), 0.0))
    return np.array(sorted(arcs), SEARCH_ARC)
