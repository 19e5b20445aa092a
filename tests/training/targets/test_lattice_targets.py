"""Lattice targets: none is lost, the store is the logits', the bytes are any distribution's."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from infra.settings import canonical_json, plain
from infra.store.object_store import ObjectStore
from pipeline.audit.verify import Expectation, verify_run
from pipeline.kbest import soft_targets
from pipeline.records import Tally
from pipeline.runs.engine import LossBudgetExceededError
from pipeline.runs.manifest import Manifest
from pipeline.runs.names import GRAPH_STEP, TARGETS_TUNING_STEP, TEACHER
from pipeline.settings import TargetsConfig
from pipeline.splicing import splice
from pipeline.steps.targets import TargetsSearch, generate_targets
from tests.in_process_teacher import stream_alone
from tests.small_corpus import serially
from tests.training.decode.toy_language import toy_lexicon
from tests.training.decode.whole_graphs import decoding_graph, witten_bell_arpa
from tests.training.sequence_training.toy_run import SCALE, TREE, finish, sentence_row
from tests.training.targets.unlabelled_toy_run import (
    BIDIRECTIONAL,
    CONFIG,
    SHARDS,
    K,
    digests,
    from_logits,
    remove_targets,
    rows_of,
    unlabelled_rows,
    write_unlabelled_toy_run,
)
from training.decode.graph import DecodingGraph
from training.evaluate.graph_building import build_graphs
from training.evaluate.tuning import recipe_settings
from training.models.store import load_model
from training.sequence_training.forward_backward import StatePosteriors, state_posteriors
from training.sequence_training.lattice_decoder import (
    LatticeError,
    decode_lattice,
    decode_posteriors,
)
from training.settings.decoding import (
    EvaluationConfig,
    FirstPassConfig,
    LatticeConfig,
    LatticeTargetsConfig,
)
from training.targets import lattice_targets
from training.targets.lattice_targets import Score, open_lattice_teacher, search_settings
from training.targets.teacher import decode_logits, serve_logits

EVALUATION = EvaluationConfig(
    ngram_order=2,
    acoustic_scale=SCALE,
    beam=13.0,
    max_active=100,
    first_pass=FirstPassConfig(ngram_order=2, pruning=0.0),
)
SEARCH = TargetsSearch((GRAPH_STEP,), {})
# Rescoring parts states by words, and leaves out of these what is beyond the beam: here nothing is.
LATTICES = LatticeTargetsConfig(weight=1.0, beam=40.0, lattice_beam=25.0)
NARROW = replace(LATTICES, beam=13.0, lattice_beam=6.0)
"""The beams of recipes, which take a sixth of the time."""


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a bidirectional teacher, three unlabelled shards, and the graph."""
    folder = tmp_path_factory.mktemp("toy")
    build_graphs(*write_unlabelled_toy_run(folder), EVALUATION, (1, 2))
    return folder


def score(run_uri: str) -> Score:
    """Return the teacher's logits, as a server in this process makes them."""
    function = serve_logits("cpu", run_uri, canonical_json(BIDIRECTIONAL), TEACHER)
    return partial(stream_alone, function, decode_logits)


def label(
    folder: Path,
    lattices: LatticeTargetsConfig = NARROW,
    config: TargetsConfig = CONFIG,
    distribute: Callable = serially,
    loss_budget: float = 0.0,
) -> Manifest:
    """Label into a fresh targets step, by lattices."""
    run_uri = str(folder / "run")
    store = ObjectStore((str(folder),))
    remove_targets(folder)
    settings = search_settings(store, run_uri, EVALUATION, lattices)
    teacher = open_lattice_teacher(store, run_uri, score(run_uri), config.k, lattices, settings)
    arguments = store, run_uri, config, teacher, distribute, (TEACHER,), SEARCH, loss_budget
    return generate_targets(*arguments).manifest


def test_targets_are_those_of_each_utterances_lattice(toy_run: Path) -> None:
    """Half the posteriors of the logits at the stored offset, half those of their lattice."""
    store, run_uri = ObjectStore((str(toy_run),)), str(toy_run / "run")
    found = rows_of(toy_run, label(toy_run, replace(LATTICES, weight=0.5)))
    assert [row.offset for row in found] == [
        row.offset for row in rows_of(toy_run, from_logits(toy_run))
    ]
    assert {row.offset for row in found} == {0, 1, 2}
    words = [sentence_row(part, row).text.split() for part in (0, 1) for row in range((5, 3)[part])]
    lexicon = toy_lexicon()
    trained = load_model(store, run_uri, TEACHER, BIDIRECTIONAL)
    graph = decoding_graph(lexicon, TREE, witten_bell_arpa(words, lexicon.pronunciations, 2))
    features = [row.features for shard in range(len(SHARDS)) for row in unlabelled_rows(shard)]
    for row, frames in zip(found, features, strict=True):
        spliced = torch.from_numpy(splice(frames, row.offset).astype(np.float32))
        posteriors = trained.model.utterance_logits([spliced])[0].softmax(dim=1)
        scores = (SCALE * (posteriors.log() - trained.log_priors)).numpy()
        lattice = decode_lattice(graph, scores, LatticeConfig(2, beam=40.0, lattice_beam=25.0))
        each = state_posteriors(lattice, scores)
        expected = 0.5 * posteriors.numpy()
        expected[each.frames, each.senones] += 0.5 * each.probabilities
        kept = np.take_along_axis(expected, row.kbest.senones.astype(np.int64), axis=1)
        kept /= kept.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(soft_targets(row.kbest), kept, atol=2e-3)


def test_weight_0_writes_the_logits_targets(toy_run: Path) -> None:
    """All shards have the bytes that the source "logits" gives, and statistics are the same."""
    own = from_logits(toy_run)
    found = label(toy_run, replace(NARROW, weight=0.0))
    assert digests(found) == digests(own)
    assert found.statistics == own.statistics
    assert digests(label(toy_run)) != digests(own)


def test_a_search_that_fails_keeps_the_teachers_own_targets(
    toy_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its row is the logits'; counts balance."""
    own = {row.utterance_id: row for row in rows_of(toy_run, from_logits(toy_run))}
    by_length = {len(row.kbest.log_z): name for name, row in own.items()}
    unread = min(
        length
        for length in by_length
        if sum(len(row.kbest.log_z) == length for row in own.values()) == 1
    )

    def failing(graph: DecodingGraph, scores: np.ndarray, *others: Any) -> StatePosteriors:
        if len(scores) == unread:
            raise LatticeError(f"{unread} frames: unread")
        return decode_posteriors(graph, scores, *others)

    monkeypatch.setattr(lattice_targets, "decode_posteriors", failing)
    manifest = label(toy_run, loss_budget=0.2)
    assert manifest.statistics["without_lattice"] == {"lattice_failed": 1}
    assert manifest.tally_in == manifest.tally_out
    found = {row.utterance_id: row for row in rows_of(toy_run, manifest)}
    assert found.keys() == own.keys()
    same = {
        name
        for name, row in found.items()
        if row.kbest.logits.tobytes() == own[name].kbest.logits.tobytes()
    }
    assert same == {by_length[unread]}
    store, run_uri = ObjectStore((str(toy_run),)), str(toy_run / "run")
    checked = verify_run(store, run_uri, str(toy_run / "corpus"), lambda *_: None, Expectation())
    assert [each for each in checked.findings if each.object.startswith("targets")] == []
    with pytest.raises(
        LossBudgetExceededError,
        match=r"1 of 11 utterances without a lattice, the loss budget is 5.00%; reasons: .*_fail",
    ):
        label(toy_run, loss_budget=0.05)


def test_bytes_do_not_depend_on_the_distribution(toy_run: Path) -> None:
    """Tasks in another order, and a step that resumes, give the same shards and manifest."""

    def backwards(elements: Sequence, function: Callable, description: str) -> list:
        return serially(list(elements)[::-1], function, description)[::-1]

    first = label(toy_run)
    assert label(toy_run, distribute=backwards).to_bytes() == first.to_bytes()

    def only_one(elements: Sequence, function: Callable, description: str) -> list:
        del description
        function(elements[1])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        label(toy_run, distribute=only_one)
    store, run_uri = ObjectStore((str(toy_run),)), str(toy_run / "run")
    settings = search_settings(store, run_uri, EVALUATION, NARROW)
    teacher = open_lattice_teacher(store, run_uri, score(run_uri), K, NARROW, settings)
    resumed = generate_targets(store, run_uri, CONFIG, teacher, serially, search=SEARCH)
    assert resumed.manifest.to_bytes() == first.to_bytes()


@pytest.mark.parametrize("stated", [{}, {"acoustic_scale": 0.9}, {"ngram_order": 2}])
def test_tuned_settings_decide_what_the_recipe_leaves_open(
    tmp_path: Path, stated: dict[str, float]
) -> None:
    """Scale and order of the recipe come first, then the teacher's tuned settings, all four."""
    store, run_uri, _ = write_unlabelled_toy_run(tmp_path)
    tuned = {"acoustic_scale": 0.7, "ngram_order": 1, "language_model_scale": 0.8}
    chosen = {**tuned, "insertion_penalty": 0.5}
    finish(store, run_uri, TARGETS_TUNING_STEP, Tally(), (), settings={TEACHER: chosen})
    lattices = replace(LATTICES, **stated)
    found = search_settings(store, run_uri, EVALUATION, lattices, TEACHER)
    assert plain(found) == {**chosen, **stated}
    untuned = search_settings(store, run_uri, EVALUATION, lattices)
    assert plain(untuned) == {**plain(recipe_settings(EVALUATION)), **stated}


def test_lattices_are_rescored(toy_run: Path) -> None:
    """By another order of the language model, targets are others; 0 stands for the evaluation's."""
    by_order = {
        order: digests(label(toy_run, replace(NARROW, ngram_order=order))) for order in (0, 1, 2)
    }
    assert by_order[0] == by_order[2] != by_order[1]
