"""A run's graph is that of the first pass's model, and grammars are those of each order."""

from dataclasses import replace
from pathlib import Path

import pytest

from infra.store.object_store import ObjectStore
from pipeline.runs.manifest import read_manifest
from pipeline.runs.names import ALIGNMENT_STEP, GRAPH_STEP
from tests.training.decode.toy_language import toy_lexicon
from tests.training.sequence_training.toy_run import SCALE, TREE, sentence_row
from tests.training.targets.unlabelled_toy_run import write_unlabelled_toy_run
from training.decode import graph
from training.decode.arpa import read_arpa
from training.decode.const_fst import ConstFst
from training.decode.entropy_pruning import pruned
from training.decode.grammar import ngram_grammar
from training.decode.graph import grammar_graph, word_ids, word_table
from training.decode.ngrams import BackoffModel, witten_bell
from training.evaluate import graph_building
from training.evaluate.graph_building import build_graphs
from training.evaluate.stored_graphs import BuiltGraphs
from training.settings.decoding import EvaluationConfig, FirstPassConfig

ORDERS = (1, 2, 3)
FIRST_PASS = FirstPassConfig(ngram_order=3, pruning=0.01)
EVALUATION = EvaluationConfig(
    ngram_order=2, acoustic_scale=SCALE, beam=13.0, max_active=100, first_pass=FIRST_PASS
)
LEXICON = toy_lexicon()
ARPA = """\
\\data\\
ngram 1=4
ngram 2=2

\\1-grams:
-99\t<s>\t-0.3
-1\t</s>
-0.5\ta\t-0.2
-0.7\tsee\t-0.1

\\2-grams:
-0.25\t<s> see
-0.5\tsee a

\\end\\
"""


@pytest.fixture
def place(tmp_path: Path) -> tuple[ObjectStore, str, str]:
    return write_unlabelled_toy_run(tmp_path)


def model_of(order: int) -> BackoffModel:
    """The model of the run's transcripts."""
    words = [sentence_row(part, row).text.split() for part in (0, 1) for row in range((5, 3)[part])]
    return witten_bell(words, LEXICON.pronunciations.keys(), order)


def small_model() -> BackoffModel:
    """The run's model of the first pass, whose histories have Witten-Bell's probabilities."""
    return pruned(model_of(3), FIRST_PASS.pruning, model_of(3)).as_searched()


def grammar_of(model: BackoffModel) -> ConstFst:
    return ngram_grammar(model, word_ids(LEXICON))


def same(one: ConstFst, other: ConstFst) -> bool:
    return one.to_bytes() == other.to_bytes()


def test_graph_is_of_the_small_model_and_grammars_of_all(
    place: tuple[ObjectStore, str, str],
) -> None:
    """All that is stored can be mapped, and pruning leaves fewer arcs."""
    manifest = build_graphs(*place, EVALUATION, ORDERS).manifest
    built = BuiltGraphs.of(*place[:2])
    small = grammar_of(small_model())
    assert len(small.arcs) < len(grammar_of(model_of(3)).arcs)
    assert same(built.grammar(built.first_pass), small)
    graph = built.graph
    assert same(graph.fst, grammar_graph(LEXICON, TREE, small).fst)
    assert (graph.words, graph.num_senones) == (word_table(LEXICON), TREE.num_senones)
    assert sorted(built.rescoring) == list(ORDERS)
    for order, output in built.rescoring.items():
        assert same(built.grammar(output), grammar_of(model_of(order)))
    assert ALIGNMENT_STEP in manifest.inputs


def test_users_own_model_is_that_of_each_order(place: tuple[ObjectStore, str, str]) -> None:
    """Its grammar is stored once; the first pass is pruned from it."""
    store, run_uri, corpus_uri = place
    Path(corpus_uri, "own.arpa").write_text(ARPA)
    build_graphs(*place, replace(EVALUATION, arpa="own.arpa"), ORDERS)
    built = BuiltGraphs.of(store, run_uri)
    assert len(set(built.rescoring.values())) == 1
    assert len(read_manifest(store, run_uri, GRAPH_STEP).outputs) == 4
    own = grammar_of(read_arpa(ARPA.splitlines()))
    assert same(built.grammar(built.rescoring[2]), own)
    assert len(built.grammar(built.first_pass).arcs) <= len(own.arcs)
    assert built.searched_words == {"a", "see"}  # the lexicon has more


def test_graph_is_built_once(place: tuple[ObjectStore, str, str]) -> None:
    """A second call finds it; another pruning is another step's, and is refused."""
    build_graphs(*place, EVALUATION, ORDERS)
    assert build_graphs(*place, EVALUATION, ORDERS).was_finished
    # How lattices are scored does not change the graph.
    assert build_graphs(*place, replace(EVALUATION, acoustic_scale=0.5), ORDERS).was_finished
    other = replace(EVALUATION, first_pass=replace(FIRST_PASS, pruning=0.0))
    with pytest.raises(ValueError, match="first_pass"):
        build_graphs(*place, other, ORDERS)


def test_model_too_large_for_memory_is_refused(
    place: tuple[ObjectStore, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the size, the bound and the remedy, and nothing is built."""
    num_arcs = len(grammar_of(small_model()).arcs)
    monkeypatch.setattr(graph, "MAX_GRAMMAR_ARCS", num_arcs - 1)
    monkeypatch.setattr(graph_building, "grammar_graph", None)
    need = (
        rf"{num_arcs} arcs: need at most {num_arcs - 1}, .* raise evaluation\.first_pass\.pruning"
    )
    with pytest.raises(ValueError, match=need):
        build_graphs(*place, EVALUATION, ORDERS)
    monkeypatch.undo()
    monkeypatch.setattr(graph, "MAX_GRAMMAR_ARCS", num_arcs)
    build_graphs(*place, EVALUATION, ORDERS)
