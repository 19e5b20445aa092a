"""Build a run's decoding graph and grammars, once, for all that searches (003 II-A2, VII-D).

The graph is of a small n-gram model, as that of a large one would not fit into memory. Lattices
that are found by it are rescored: less the small model's costs, plus a large one's.
"""

from collections.abc import Sequence

from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.engine import StepResult, StepRun, StepSpec, run_step
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import ALIGNMENT_STEP, BOOTSTRAP_STEP, GRAPH_STEP
from training.align.labelled import read_lexicon, read_tree
from training.decode.grammar import ngram_grammar
from training.decode.graph import grammar_graph, require_room, word_ids
from training.decode.ngrams import arpa_text
from training.evaluate.language_model import LanguageModelFiles
from training.evaluate.stored_graphs import put_fst, put_words
from training.settings.decoding import EvaluationConfig, graph_settings


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
        pruned = language_model.pruned(config.ngram_order, config.pruning)
        # Rescoring takes off what the search has added.
        small = ngram_grammar(pruned.as_searched(), ids)
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
        outputs = (
            put_fst(step.context, "graph", graph.fst),
            put_words(step.context, graph.words),
            put_fst(step.context, "first_pass", small),
            *grammars,
        )
        statistics |= {"num_states": len(graph.fst.states), "num_arcs": len(graph.fst.arcs)}
        return step.lossless(Tally(), outputs, statistics)

    config = graph_settings(evaluation, orders)
    digests = {**lexicon.digests, **files.digests}
    return run_step(StepSpec(store, run_uri, GRAPH_STEP, config, reads, digests), build)
