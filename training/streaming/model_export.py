"""Export a run's model with the graph and the settings that its evaluation decodes with."""

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import subsets_of_run
from pipeline.runs.names import ALIGNMENT_STEP, DEV, features_step, model_step
from training.configuration.decoding import DecodingSettings
from training.decoding.graph.grammar import GrammarWeights
from training.decoding.graph.hclg import DecodingGraph, decoding_graph
from training.decoding.lexicon import SILENCE_ID
from training.evaluation.language_model import LanguageModelFiles
from training.evaluation.tuning import recipe_settings, tuned_settings
from training.models.lstm import LstmModel
from training.models.store import load_model
from training.recipes import Recipe
from training.streaming.archive import ExportedModel, ExportedSettings, ExportPrecision
from training.streaming.onnx_graph import in_int8, require_exportable, streaming_graph
from training.targets.alignment import read_tree
from training.targets.labelled import read_lexicon


def export_model(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    recipe: Recipe,
    name: str,
    precision: ExportPrecision = "float32",
) -> ExportedModel:
    """Export model `name`, such as the student; ValueError for a form without explicit state.

    Settings are those tuned on development speakers where there are some, else the recipe's.
    """
    form = recipe.models.of(name)
    try:
        require_exportable(form)
    except ValueError as error:
        raise ValueError(f"{name} cannot be exported: {error}") from error
    trained = load_model(store, run_uri, name, form)
    assert isinstance(trained.model, LstmModel)
    network = streaming_graph(trained.model, recipe.features.mean)
    settings = recipe_settings(recipe.evaluation)
    if DEV in subsets_of_run(store, run_uri, features_step):
        settings = tuned_settings(store, run_uri)[name]
    tree = read_tree(store, run_uri)
    exported = ExportedSettings(
        format=1,
        name=name,
        precision=precision,
        engine=recipe.features.engine,
        delay=form.delay,
        acoustic_scale=settings.acoustic_scale,
        beam=recipe.evaluation.beam,
        max_active=recipe.evaluation.max_active,
        silence=tuple(sorted({int(each) for each in tree.table[:, SILENCE_ID].flat})),
        log_priors=tuple(trained.log_priors.tolist()),
    )
    data = in_int8(network) if precision == "int8" else network.SerializeToString()
    graph = _graph(store, run_uri, corpus_uri, recipe, name, settings)
    return ExportedModel(data, graph, exported)


def _graph(
    store: ObjectStore,
    run_uri: str,
    corpus_uri: str,
    recipe: Recipe,
    name: str,
    settings: DecodingSettings,
) -> DecodingGraph:
    lexicon = read_lexicon(store, run_uri, corpus_uri, [ALIGNMENT_STEP, model_step(name)]).parse()
    files = LanguageModelFiles.read(store, corpus_uri, recipe.evaluation)
    arpa = files.model(store, run_uri, lexicon, recipe.evaluation).arpa(settings.ngram_order)
    weights = GrammarWeights(settings.language_model_scale, settings.insertion_penalty)
    return decoding_graph(lexicon, read_tree(store, run_uri), arpa, weights)
