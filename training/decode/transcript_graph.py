"""Build the graph of a transcript that may be wrong: readings, and garbage for all else.

Garbage is a word of one phone, whose senone is a column of its own behind the tree's. Its score at
a frame is the best senone's, minus a cost: an "on-line garbage model" (H. Bourlard, B. D'hoore and
J.-M. Boite 1994). So a wrong word, or one that is missing, bends none of its neighbours.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, pairwise
from types import MappingProxyType

import numpy as np
from jaxtyping import Float32

from training.decode.const_fst import ARC, ConstFst
from training.decode.grammar import BACKOFF_WORD
from training.decode.graph import DecodingGraph, senone_graph, word_ids
from training.decode.lexicon import SILENCE_ID, Lexicon, Pronunciation
from training.decode.senones import Node, SenoneTree, Split

GARBAGE = "\U0010ffff"
"""The word of speech that no word of a transcript explains: no lexicon has this character."""

_GARBAGE_PHONE = "\U0010ffff"
"""Its phone: it sorts behind a lexicon's, so that these keep their ids."""


_Arc = tuple[int, tuple[int, int, float, int]]
"""A source, and the fields of ARC."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Slot: what may have been said at a place of a transcript, each with its cost in nats.

    A reading without words is that nothing was said there. The slot is dropped at `dropping_cost`,
    and its speech is garbage; without readings it must be.
    """

    readings: Mapping[tuple[str, ...], float]
    dropping_cost: float


@dataclass(frozen=True)
class Garbage:
    """Garbage: a lexicon and a tree with the word, phone and senone of garbage.

    Its senone is `tree.num_senones - 1`. Phones beside garbage are as beside silence.
    """

    lexicon: Lexicon
    tree: SenoneTree

    @classmethod
    def beside(cls, lexicon: Lexicon, tree: SenoneTree) -> "Garbage":
        """Add garbage to a lexicon and its tree."""
        phone = len(tree.phones)
        words = {**lexicon.pronunciations, GARBAGE: ((_GARBAGE_PHONE,),)}
        roots = (*(_as_silence(root, phone) for root in tree.roots), tree.num_senones)
        phones = (*tree.phones, _GARBAGE_PHONE)
        return cls(replace(lexicon, pronunciations=words), SenoneTree(phones, roots))

    @property
    def senone(self) -> int:
        """The column of garbage."""
        return self.tree.num_senones - 1

    def scores(
        self, scores: Float32[np.ndarray, "frames senones"], frame_cost: float
    ) -> Float32[np.ndarray, "frames senones_and_garbage"]:
        """Add garbage's column to scaled log-likelihoods; `frame_cost` is in their units."""
        best = scores.max(axis=1, keepdims=True) - np.float32(frame_cost)
        return np.concatenate([scores, best], axis=1)

    def graph(
        self,
        slots: Sequence[Slot],
        opening_cost: float,
        spelled: Mapping[str, Pronunciation] = MappingProxyType({}),
    ) -> DecodingGraph:
        """Build HCLG of a transcript; ValueError for words without pronunciation.

        `spelled` are pronunciations of words that the lexicon lacks.
        Between two words, or before the first and after the last, speech may be garbage at
        `opening_cost`, and then slots may be dropped. So each way to drop some is one path.
        """
        words = {word for slot in slots for reading in slot.readings for word in reading}
        known = self.lexicon.restricted_to((*words - spelled.keys(), GARBAGE)).pronunciations
        made = {word: (spelled[word],) for word in words & spelled.keys()}
        spoken = Lexicon({**known, **made})
        ids = word_ids(spoken)

        def arc(source: int, target: int, word: str, cost: float) -> _Arc:
            # Without a label where nothing is said, determinization would list all sets of places
            # that a word may be at: of 28 words of a phrase again and again, for minutes.
            label = ids[word or BACKOFF_WORD]
            return source, (label, label, cost, target)

        # State 2 n is before slot n, state 2 n + 1 the same behind garbage.
        end = 2 * len(slots)
        arcs = [arc(state, state + 1, GARBAGE, opening_cost) for state in range(0, end + 1, 2)]
        more = count(end + 2)
        for place, slot in enumerate(slots):
            before, behind_garbage, after = 2 * place, 2 * place + 1, 2 * place + 2
            arcs.append(arc(behind_garbage, behind_garbage + 2, "", slot.dropping_cost))
            for reading, cost in slot.readings.items():
                if not reading:
                    arcs += [arc(before, after, "", cost)]
                    arcs += [arc(behind_garbage, behind_garbage + 2, "", cost)]
                    continue
                states = [*(next(more) for _ in reading[1:]), after]
                arcs += [
                    arc(state, states[0], reading[0], cost) for state in (before, behind_garbage)
                ]
                steps = zip(pairwise(states), reading[1:], strict=True)
                arcs += [arc(*step, word, 0.0) for step, word in steps]
        sources, of_sources = zip(*arcs, strict=True)
        final_costs = np.full(next(more), np.inf, np.float32)
        final_costs[end : end + 2] = 0
        grammar = ConstFst.of(np.array(sources), np.array(list(of_sources), ARC), final_costs, 0)
        return senone_graph(self.lexicon, spoken, grammar, self.tree)


def _as_silence(node: Node, phone: int) -> Node:
    """Let a phone answer each question as silence does."""
    if isinstance(node, int):
        return node
    phones = node.phones | {phone} if SILENCE_ID in node.phones else node.phones
    return Split(
        node.side, phones, _as_silence(node.inside, phone), _as_silence(node.outside, phone)
    )
