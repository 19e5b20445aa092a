"""Thresholds of transcripts are those whose labels are nearest to what was said."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from infra.store.object_store import ObjectStore
from pipeline.records import Hypothesis, Tally
from pipeline.runs.commit import step_context
from pipeline.runs.names import DEV, GRAPH_STEP, TEACHER, features_step
from pipeline.shards import FeatureRow, write_features
from pipeline.steps.features import WITH_HYPOTHESES
from tests.small_corpus import serially
from tests.training.sequence_training.toy_run import SCALE, finish, sentence_row
from tests.training.targets.test_lattice_targets import EVALUATION
from tests.training.targets.unlabelled_toy_run import (
    BIDIRECTIONAL,
    feature_row,
    write_unlabelled_toy_run,
)
from training.evaluate.graph_building import build_graphs
from training.evaluate.stored_graphs import BuiltGraphs
from training.evaluate.tuning import recipe_settings
from training.settings.decoding import LatticeTargetsConfig, TranscriptsConfig
from training.targets.lattice_targets import LatticeSearch
from training.targets.transcript_targets import TranscriptAligner, TranscriptPlace
from training.targets.transcript_tuning import (
    TuningPlace,
    candidates,
    sample,
    tune_transcripts,
    tuned_transcripts,
    weights_of,
)

CONFIG = TranscriptsConfig(weight=0.6, garbage_cost=5.0, max_garbage=1.0)


def place_of(folder: Path, wrong: bool, heard: bool = True) -> TuningPlace:
    """A toy run with six development sentences; a recognizer heard right or wrong words."""
    store, run_uri, corpus_uri = write_unlabelled_toy_run(folder)
    rows = []
    for number in range(6):
        sentence = sentence_row(20, number)
        row = feature_row(sentence.utterance_id, sentence, sentence.text)
        text = "sake be sake be" if wrong else sentence.text or ""
        rows.append(replace(row, hypotheses=(Hypothesis("r", text, -0.1),) if heard else ()))
    write_dev(store, run_uri, rows)
    place = TranscriptPlace(store, run_uri, corpus_uri, CONFIG)
    return TuningPlace(place, SCALE, TEACHER, BIDIRECTIONAL)


def write_dev(store: ObjectStore, run_uri: str, rows: list[FeatureRow]) -> None:
    step, tally = features_step(DEV), Tally.of(rows)
    context = step_context(store, run_uri, step, {}, {})
    halves = [rows[:4], rows[4:]]
    outputs = [
        context.put_output(f"{number:06d}", ".parquet", write_features(some), Tally.of(some))
        for number, some in enumerate(halves)
    ]
    heard = sum(bool(row.hypotheses) for row in rows)
    finish(store, run_uri, step, tally, tuple(outputs), **{WITH_HYPOTHESES: heard})


@pytest.mark.parametrize(("wrong", "weight"), [(False, 0.95), (True, 0.5)])
def test_right_words_weigh_more_than_wrong_ones(tmp_path: Path, wrong: bool, weight: float) -> None:
    """The chosen labels are nearer to the truth than the recipe's; a second call finds them."""
    place = place_of(tmp_path, wrong)
    made = tune_transcripts(place, {}, serially)
    stated = made.manifest.statistics
    assert stated["settings"]["weight"] == weight
    assert stated["cross_entropy"]["chosen"] <= stated["cross_entropy"]["recipe"]
    assert stated["num_frames"] > 50
    chosen = tuned_transcripts(CONFIG, made.manifest)
    assert chosen.weight == weight
    assert replace(chosen, **plain_settings(CONFIG)) == CONFIG
    assert tune_transcripts(place, {}, serially).was_finished


def test_candidates_of_one_confidence_share_an_utterances_graph(tmp_path: Path) -> None:
    """Nine candidates of two confidences: at most two graphs for each of six utterances."""
    TranscriptAligner.graph.cache_clear()
    tune_transcripts(place_of(tmp_path, wrong=False), {}, serially)
    cache = TranscriptAligner.graph.cache_info()
    assert cache.misses + cache.hits == 9 * 6
    assert cache.misses <= 2 * 6


def test_thresholds_are_chosen_as_the_lattices_weigh(tmp_path: Path) -> None:
    """Where the run's own lattices contradict right words, these labels are farther from them."""
    alone = tune_transcripts(place_of(tmp_path / "alone", wrong=False), {}, serially).manifest
    place = place_of(tmp_path / "weighed", wrong=False)
    transcripts = place.transcripts
    run = (transcripts.store, transcripts.run_uri)
    build_graphs(*run, transcripts.corpus_uri, EVALUATION, (2,))
    config, settings = LatticeTargetsConfig(), recipe_settings(EVALUATION)
    lattices = LatticeSearch(BuiltGraphs.of(*run), settings, config)
    weighed = replace(transcripts, config=replace(CONFIG, lattice_agreement=1.0))
    place = replace(place, transcripts=weighed, lattices=lattices)
    found = tune_transcripts(place, {"lattices": True}, serially).manifest
    assert GRAPH_STEP in found.inputs
    weighing, without = (each.statistics["cross_entropy"]["chosen"] for each in (found, alone))
    assert weighing > without


def plain_settings(config: TranscriptsConfig) -> dict[str, float]:
    names = ("garbage_cost", "min_confidence", "weight")
    return {name: getattr(config, name) for name in names}


def test_without_a_frame_to_compare_the_recipe_decides(tmp_path: Path) -> None:
    """As where no recognizer heard the development speakers."""
    made = tune_transcripts(place_of(tmp_path, wrong=False, heard=False), {}, serially)
    assert made.manifest.statistics["settings"] == plain_settings(CONFIG)
    assert made.manifest.statistics["num_frames"] == 0


def test_the_recipes_own_settings_are_tried_first() -> None:
    """Each candidate once; equal ones are not tried twice."""
    tried = candidates(CONFIG)
    assert tried[0] == CONFIG
    assert len(set(tried)) == len(tried) == 9
    assert len(candidates(replace(CONFIG, garbage_cost=3.0))) == 8
    assert weights_of(CONFIG)[0] == 0.6
    assert weights_of(replace(CONFIG, weight=0.9))[0] == 0.9
    assert len(weights_of(replace(CONFIG, weight=0.9))) == 5


def test_the_sample_is_of_those_that_were_heard() -> None:
    """Whatever the order of the rows."""
    rows = [feature_row(f"u{n}", sentence_row(20, 0), "see") for n in range(9)]
    heard = [replace(row, hypotheses=(Hypothesis("r", "a"),)) for row in rows[:6]]
    drawn = [row.utterance_id for row in sample([*rows[6:], *heard], 4)]
    assert drawn == [row.utterance_id for row in sample([*heard[::-1], *rows[6:]], 4)]
    assert len(drawn) == 4
    assert np.isin(drawn, [row.utterance_id for row in heard]).all()
