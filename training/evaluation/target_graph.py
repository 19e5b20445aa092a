"""The graph that the teacher searches for lattice targets: the language model of the evaluation."""

from dataclasses import replace

from infra.settings import plain
from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.commit import StepContext
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BOOTSTRAP_STEP,
    TARGETS_GRAPH_STEP,
    TARGETS_TUNING_STEP,
)
from pipeline.runs.step import StepContents, StepResult, StepSpec, run_step
from training.configuration.decoding import EvaluationConfig
from training.configuration.targets import LatticeTargetsConfig, target_graph_settings
from training.decoding.graph.grammar import GrammarWeights
from training.decoding.graph.graph_text import encode_graph
from training.decoding.graph.hclg import decoding_graph
from training.evaluation.language_model import LanguageModelFiles
from training.evaluation.tuning import recipe_settings, tuned_settings
from training.targets.alignment import read_tree
from training.targets.labelled import read_lexicon


def build_target_graph(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    evaluation: EvaluationConfig,
    lattices: LatticeTargetsConfig,
    tuned_model: str = "",
) -> StepResult:
    """Build the graph once, for all tasks; its statistics state the settings that it is for.

    What the recipe leaves open is what was tuned for `tuned_model`, or else the evaluation's.
    """
    reads = [ALIGNMENT_STEP, BOOTSTRAP_STEP, *([TARGETS_TUNING_STEP] if tuned_model else [])]
    lexicon = read_lexicon(store, run_uri, corpus_uri, reads)
    files = LanguageModelFiles.read(store, corpus_uri, evaluation)
    reads += files.reads(store, run_uri)

    def build(context: StepContext) -> StepContents:
        settings = recipe_settings(evaluation)
        if tuned_model:
            settings = tuned_settings(store, run_uri, TARGETS_TUNING_STEP)[tuned_model]
        settings = replace(
            settings,
            acoustic_scale=lattices.acoustic_scale or settings.acoustic_scale,
            ngram_order=lattices.ngram_order or settings.ngram_order,
        )
        words = lexicon.parse()
        language_model = files.model(store, run_uri, words, evaluation)
        weights = GrammarWeights(settings.language_model_scale, settings.insertion_penalty)
        arpa = language_model.arpa(settings.ngram_order)
        graph = decoding_graph(words, read_tree(store, run_uri), arpa, weights)
        output = context.put_output("graph", ".txt.gz", encode_graph(graph), Tally())
        statistics = {
            "settings": plain(settings),
            "num_states": graph.fst.num_states,
            "language_model": dict(language_model.statistics),
        }
        return StepContents.of_all(Tally(), (output,), statistics)

    config = target_graph_settings(evaluation, lattices)
    digests = {**lexicon.digests, **files.digests}
    return run_step(StepSpec(store, run_uri, TARGETS_GRAPH_STEP, config, reads, digests), build)
