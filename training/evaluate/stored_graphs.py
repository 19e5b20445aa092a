"""Keep graphs and grammars in a run: files in OpenFst's const format, which workers map.

They are stored as they are mapped, not compressed: the digest in the manifest is that of the file
which a host verifies, and a host fetches 200 MB once, in less time than gzip would unpack it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.commit import StepContext
from pipeline.runs.manifest import Output, output_on_host, read_manifest, read_output
from pipeline.runs.names import GRAPH_STEP
from training.decode.const_fst import ConstFst
from training.decode.grammar import BACKOFF_WORD
from training.decode.graph import DecodingGraph
from training.decode.rescoring import SecondPass
from training.settings import MAX_ORDER
from training.settings.decoding import DecodingSettings


def put_fst(context: StepContext, name: str, fst: ConstFst) -> Output:
    """Store a graph or a grammar."""
    return context.put_output(name, ".fst", fst.to_bytes(), Tally())


@lru_cache(maxsize=1)
def _open_graph(
    store: ObjectStore, run_uri: str, fst: Output, words: Output, num_senones: int
) -> DecodingGraph:
    """Map a graph, or return it if this process mapped it last."""
    table = tuple(json.loads(read_output(store, run_uri, words)))
    return DecodingGraph(ConstFst.mapped(output_on_host(store, run_uri, fst)), table, num_senones)


@lru_cache(maxsize=MAX_ORDER + 1)
def _open_grammar(store: ObjectStore, run_uri: str, output: Output) -> ConstFst:
    """Map a grammar, or return it if this process mapped it not long ago."""
    return ConstFst.mapped(output_on_host(store, run_uri, output))


@dataclass(frozen=True, slots=True)
class BuiltGraphs:
    """BuiltGraphs are what a run's graph step made: the graph of the first pass, and grammars.

    The graph is `fst`; its ids and those of the grammars are places in `words`. `first_pass` is its
    grammar, and `rescoring` are those of n-gram models by order; a model of the user's own is that
    of each order. All are at scale 1, without insertion penalty.
    """

    store: ObjectStore
    run_uri: str
    fst: Output
    words: Output
    num_senones: int
    first_pass: Output
    rescoring: Mapping[int, Output]

    @classmethod
    def of(cls, store: ObjectStore, run_uri: str) -> "BuiltGraphs":
        """Read what the run has; ObjectNotFound where its step has not run."""
        built = read_manifest(store, run_uri, GRAPH_STEP)
        fst, words, first_pass, *grammars = built.outputs
        num_senones = built.statistic("num_senones", int)
        places = built.statistic("grammars", dict[str, int])
        rescoring = {int(order): grammars[place] for order, place in places.items()}
        return cls(store, run_uri, fst, words, num_senones, first_pass, rescoring)

    @property
    def has_own_order(self) -> bool:
        """Return whether one grammar is that of all orders."""
        return len(set(self.rescoring.values())) == 1

    @property
    def graph(self) -> DecodingGraph:
        """Map the graph, whose pages a host has once."""
        return _open_graph(self.store, self.run_uri, self.fst, self.words, self.num_senones)

    @property
    def searched_words(self) -> set[str]:
        """Return the words that hypotheses may have: those of the lexicon and the first pass."""
        words = self.graph.words
        labels = np.unique(self.grammar(self.first_pass).arcs["input_label"])
        return {words[label] for label in labels.tolist()} - {BACKOFF_WORD}

    def grammar(self, output: Output) -> ConstFst:
        """Map one of the grammars."""
        return _open_grammar(self.store, self.run_uri, output)

    def second_pass(self, settings: DecodingSettings, beam: float) -> SecondPass:
        """Map what rescores lattices at some settings; ValueError for an order without grammar."""
        if settings.ngram_order not in self.rescoring:
            orders = ", ".join(map(str, sorted(self.rescoring)))
            raise ValueError(
                f"ngram_order = {settings.ngram_order}: the run has grammars of {orders}: name one "
                "of these, or build_graph into a new --run by a recipe that names it"
            )
        return SecondPass(
            self.grammar(self.first_pass),
            self.grammar(self.rescoring[settings.ngram_order]),
            self.graph.words,
            scale=settings.language_model_scale,
            insertion_penalty=settings.insertion_penalty,
            beam=beam,
        )
