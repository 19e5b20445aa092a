"""Build a run's decoding graph and grammars, once, for all that searches (003 II-A2, VII-D).

The graph is of a small n-gram model, as that of a large one would not fit into memory. Lattices
that are found by it are rescored: less the small model's costs, plus a large one's.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.engine import StepResult, StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest, sha256
from pipeline.runs.names import ALIGNMENT_STEP, BOOTSTRAP_STEP, GRAPH_STEP, LANGUAGE_MODEL_SETTINGS
from training.align.labelled import labelled_transcripts, read_lexicon, read_tree, transcript_reads
from training.decode.entropy_pruning import pruned
from training.decode.grammar import ngram_grammar
from training.decode.graph import grammar_graph, require_room, word_ids
from training.decode.lexicon import Lexicon
from training.decode.ngrams import BackoffModel, arpa_text, kneser_ney, witten_bell
from training.evaluate.language_model import LanguageModelFile, num_unknown, with_unknown
from training.evaluate.stored_graphs import put_fst
from training.settings.decoding import EvaluationConfig, Smoothing, graph_settings


@dataclass(frozen=True, slots=True, kw_only=True)
class LanguageModel(ABC):
    """LanguageModel: what a run's hypotheses are searched with, at the order that is asked for."""

    statistics: Mapping[str, Any]
    has_own_order: ClassVar[bool]

    @abstractmethod
    def of_order(self, order: int) -> BackoffModel:
        """Return the model of an order, unpruned."""

    @abstractmethod
    def pruned(self, order: int, threshold: float) -> BackoffModel:
        """Return it without n-grams that change perplexity by less than a share, `threshold`."""


@dataclass(frozen=True, slots=True)
class GivenModel(LanguageModel):
    """GivenModel is the user's own, which has one order."""

    model: BackoffModel
    has_own_order: ClassVar[bool] = True

    def of_order(self, order: int) -> BackoffModel:
        """Return the model as it is."""
        del order
        return self.model

    def pruned(self, order: int, threshold: float) -> BackoffModel:
        """Take its own probabilities of histories: there are no counts."""
        del order
        return pruned(self.model, threshold)


@dataclass(frozen=True, slots=True)
class EstimatedModels(LanguageModel):
    """EstimatedModels are of sentences, which have UNKNOWN for words that are not in `words`."""

    sentences: Sequence[Sequence[str]]
    words: Collection[str]
    smoothing: Smoothing
    min_counts: Sequence[int]
    has_own_order: ClassVar[bool] = False

    def of_order(self, order: int) -> BackoffModel:
        """Estimate a model."""
        estimate = {"witten_bell": witten_bell, "kneser_ney": kneser_ney}[self.smoothing]
        return estimate(self.sentences, self.words, order, self.min_counts)

    def pruned(self, order: int, threshold: float) -> BackoffModel:
        """Take Witten-Bell's probabilities of histories: Kneser-Ney's are of types, not tokens."""
        histories = witten_bell(self.sentences, self.words, order)
        return pruned(self.of_order(order), threshold, histories)


@dataclass(frozen=True, slots=True)
class LanguageModelFiles:
    """LanguageModelFiles holds what an evaluation reads besides transcripts, by its setting."""

    by_setting: Mapping[str, LanguageModelFile]

    @classmethod
    def read(
        cls, store: ObjectStore, corpus_uri: str, config: EvaluationConfig
    ) -> "LanguageModelFiles":
        """Read the files that the recipe names; the store refuses others than it may read."""
        named = {name: getattr(config, name) for name in LANGUAGE_MODEL_SETTINGS}
        files = {name: uri for name, uri in named.items() if uri}
        return cls(
            {name: LanguageModelFile.read(store, corpus_uri, uri) for name, uri in files.items()}
        )

    @property
    def digests(self) -> dict[str, str]:
        """Return each file's SHA-256, as inputs of a step."""
        return {name: sha256(file.data) for name, file in self.by_setting.items()}

    def reads(self, store: ObjectStore, run_uri: str) -> list[str]:
        """Name the steps that the model reads, besides alignment."""
        return [] if "arpa" in self.by_setting else transcript_reads(store, run_uri)

    def model(
        self, store: ObjectStore, run_uri: str, lexicon: Lexicon, config: EvaluationConfig
    ) -> LanguageModel:
        """Return the user's ARPA, or what estimates models of the labelled transcripts and text.

        ValueError for a malformed ARPA, with its line.
        """
        words = lexicon.pronunciations.keys()
        if (arpa := self.by_setting.get("arpa")) is not None:
            given = arpa.restricted_arpa(words)
            counts = {
                "num_dropped_words": given.num_dropped_words,
                "num_dropped_ngrams": given.num_dropped_ngrams,
                "num_missing_words": given.num_missing_words,
            }
            return GivenModel(given.model, statistics=counts)
        sentences = with_unknown(labelled_transcripts(store, run_uri), words)
        statistics: dict[str, Any] = {}
        if (text := self.by_setting.get("language_model_text")) is not None:
            extra = text.sentences(words)
            statistics = {
                "num_text_sentences": len(extra),
                "num_text_words": sum(map(len, extra)),
                "num_unknown_words": num_unknown(extra),
            }
            sentences += extra
        return EstimatedModels(
            sentences, words, config.smoothing, config.min_counts, statistics=statistics
        )


def build_graphs(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    evaluation: EvaluationConfig,
    orders: Sequence[int],
) -> StepResult:
    """Store the graph of the first pass, its words, its grammar, and those of `orders`.

    ValueError for a malformed language model, and for one too large for memory.
    """
    reads = [ALIGNMENT_STEP, BOOTSTRAP_STEP]
    lexicon = read_lexicon(store, run_uri, corpus_uri, reads)
    files = LanguageModelFiles.read(store, corpus_uri, evaluation)
    reads += files.reads(store, run_uri)

    def build(step: StepRun) -> Manifest:
        words, tree = lexicon.parse(), read_tree(store, run_uri)
        ids = word_ids(words)
        language_model = files.model(store, run_uri, words, evaluation)
        config = evaluation.first_pass
        model = language_model.pruned(config.ngram_order, config.pruning)
        # Rescoring takes off what the search has added.
        small = ngram_grammar(model.as_searched(), ids)
        other = "prune the ARPA" if language_model.has_own_order else "lower ngram_order"
        require_room(small, f"raise evaluation.first_pass.pruning, or {other}")
        # A model of the user's own has one order: its grammar is stored once.
        kept = orders[:1] if language_model.has_own_order else orders
        grammars = []
        for order in kept:
            model = language_model.of_order(order)
            grammars.append(put_fst(step.context, f"grammar-{order}", ngram_grammar(model, ids)))
            if order == evaluation.ngram_order and not language_model.has_own_order:
                # Another run may be given the model, so that both decode by the same.
                data = arpa_text(model).encode()
                step.context.scratch.put_output(f"arpa-{order}", ".arpa", data, Tally())
            del model
        statistics = {
            "num_senones": tree.num_senones,
            "grammars": {str(order): number % len(kept) for number, order in enumerate(orders)},
            "language_model": dict(language_model.statistics),
        }
        del language_model  # before the graph takes as much memory
        graph = grammar_graph(words, tree, small)
        table = json.dumps(graph.words, ensure_ascii=False).encode()
        outputs = (
            put_fst(step.context, "graph", graph.fst),
            step.context.put_output("words", ".json", table, Tally()),
            put_fst(step.context, "first_pass", small),
            *grammars,
        )
        statistics |= {"num_states": len(graph.fst.states), "num_arcs": len(graph.fst.arcs)}
        return step.lossless(Tally(), outputs, statistics)

    config = graph_settings(evaluation, orders)
    digests = {**lexicon.digests, **files.digests}
    return run_step(StepSpec(store, run_uri, GRAPH_STEP, config, reads, digests), build)
