"""The second pass: words of a lattice, rescored by the n-gram model that a search is scored by."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from training.decode.const_fst import ConstFst
from training.decode.decoder import BestPath, FoundLattice
from training.decode.grammar import GrammarWeights
from training.decode.rescoring import (
    best_arcs,
    rescore,
    word_confidences,
    words_and_senones,
)
from training.decode.search import MAX_LATTICE_ARCS


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """Hypothesis: the best path of a rescored lattice, and the confidence of each of its words."""

    path: BestPath
    confidences: Float64[np.ndarray, " words"]


@dataclass(frozen=True, slots=True, eq=False)
class SecondPass:
    """SecondPass replaces costs of the grammar `first_pass` in lattices by those of another.

    Ids are those of `words`. What is beyond `beam` of the best path is left out.
    """

    first_pass: ConstFst
    grammar: ConstFst
    words: tuple[str, ...]
    weights: GrammarWeights
    beam: float

    def rescored(self, found: FoundLattice, max_arcs: int = MAX_LATTICE_ARCS) -> np.ndarray:
        """Return the lattice (SEARCH_ARC) by the other grammar; a narrower beam if it is large."""
        return rescore(
            found.arcs,
            self.first_pass,
            self.grammar,
            backoff_word=len(self.words) - 1,  # word tables end in it
            scale=self.weights.scale,
            insertion_penalty=self.weights.insertion_penalty,
            beam=self.beam,
            ends_sentence=found.ends_sentence,
            max_arcs=max_arcs,
        )

    def best(self, found: FoundLattice) -> BestPath:
        """Return the best path of the rescored lattice."""
        lattice = self.rescored(found)
        return words_and_senones(lattice[best_arcs(lattice)], self.words)

    def hypothesis(self, found: FoundLattice) -> Hypothesis:
        """Return the best path, and how probable its words are among all of the lattice."""
        lattice = self.rescored(found)
        arcs = best_arcs(lattice)
        path = words_and_senones(lattice[arcs], self.words)
        return Hypothesis(path, word_confidences(lattice, arcs))
