"""Write a run with a trained student and held-out audio, which an exported model can hear."""

from pathlib import Path

from infra.store.object_store import ObjectStore
from pipeline.runs.names import HELDOUT, STUDENT
from pipeline.steps.features import extract_features
from pipeline.steps.selection.select import metadata_uri, select_utterances
from tests.small_corpus import serially, write_corpus, write_metadata
from tests.training.sequence_training.toy_run import CONFIG, SENTENCES, write_toy_run
from tests.whole_path.processes import TINY
from training.evaluate.graph_building import build_graphs
from training.settings.decoding import rescoring_orders
from training.settings.recipe import Recipe, read_recipe

SETTINGS = (
    f"models.student.num_layers={CONFIG.num_layers}",
    f"models.student.num_units={CONFIG.num_units}",
    f"models.student.look_ahead={CONFIG.look_ahead}",
)


def write_heard_run(folder: Path) -> tuple[ObjectStore, str, str]:
    """Two speakers say three utterances each, in tones: the store, the run and the corpus."""
    store, run_uri, corpus_uri = write_toy_run(folder, STUDENT)
    records = write_corpus(store, corpus_uri, HELDOUT, 2, 3)
    said = [
        {**record, "text": " ".join(SENTENCES[number % len(SENTENCES)])}
        for number, record in enumerate(records)
    ]
    write_metadata(store, corpus_uri, HELDOUT, said)
    place, recipe = (store, run_uri, HELDOUT), heard_recipe()
    source = metadata_uri(corpus_uri, HELDOUT)
    select_utterances(*place, source, recipe.selection, 0.0, serially)
    extract_features(*place, corpus_uri, recipe.features, 0.0, serially)
    orders = rescoring_orders(recipe.evaluation, recipe.tuning, recipe.targets.lattices)
    build_graphs(store, run_uri, corpus_uri, recipe.evaluation, orders)
    return store, run_uri, corpus_uri


def heard_recipe() -> Recipe:
    """Return the recipe of the run."""
    return read_recipe(str(TINY), SETTINGS)
