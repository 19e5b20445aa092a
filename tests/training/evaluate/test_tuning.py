"""Tuning chooses, one setting after the other, what has the fewest errors, for each model."""

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from infra.settings import plain
from infra.store.object_store import ObjectStore
from jobs.cli.job import recipe_path
from pipeline.filterbank import NUM_BINS
from pipeline.records import Tally
from pipeline.runs.engine import StepSpec, run_step
from pipeline.runs.manifest import read_output
from pipeline.runs.names import ALIGNMENT_STEP, DEV_ALIGNMENT_STEP, TUNING_STEP, realignment_rounds
from pipeline.shards import FeatureRow
from tests.small_corpus import serially
from tests.training.decode.toy_language import toy_lexicon
from tests.training.decode.whole_graphs import GrammarWeights, decoding_graph, witten_bell_arpa
from tests.training.evaluate.oracle_run import (
    CONFIG,
    LISTENS_FROM,
    MODELS,
    SENTENCES,
    TREE,
    Oracle,
    OracleRun,
    heldout_rows,
    row,
    scores_of,
    write_oracle_run,
)
from training.decode.decoder import DecoderConfig, FoundLattice, decode
from training.decode.grammar import ngram_grammar
from training.decode.graph import DecodingGraph, word_ids
from training.decode.ngrams import witten_bell
from training.decode.rescoring import SecondPass
from training.evaluate import slices, tuning
from training.evaluate.heldout import HypothesisTask, decode_slice, evaluate
from training.evaluate.slices import ModelsToDecode, scored_pieces
from training.evaluate.tuning import CurvePoint, best_of, search, tune, tuned_settings
from training.evaluate.word_errors import WordErrors, word_errors
from training.fit.model_specs import (
    aligner_fit,
    baseline_fit,
    sequence_fit,
    student_fit,
    teacher_fit,
)
from training.models.store import TrainedModel
from training.settings.decoding import DecodingSettings, TuningConfig
from training.settings.models import ModelConfig
from training.settings.recipe import read_recipe

START = DecodingSettings(acoustic_scale=0.3, ngram_order=3)


def run_search(start: DecodingSettings, grid, count) -> list[CurvePoint]:
    """Search for one model, and count what it asks for."""
    return search(start, grid, [""], lambda asked: {"": count(asked[""])})[""]


class Decoded:
    """Decoded counts errors by a rule, and keeps the settings that it was asked for."""

    def __init__(self, best: DecodingSettings) -> None:
        self.best = best
        self.asked: list[DecodingSettings] = []

    def __call__(self, settings: Sequence[DecodingSettings]) -> list[WordErrors]:
        self.asked += settings
        return [
            WordErrors(substitutions=self.errors(each), reference_words=99) for each in settings
        ]

    def errors(self, each: DecodingSettings) -> int:
        return (
            round(100 * abs(each.acoustic_scale - self.best.acoustic_scale))
            + 7 * abs(each.ngram_order - self.best.ngram_order)
            + round(10 * abs(each.language_model_scale - self.best.language_model_scale))
            + round(4 * abs(each.insertion_penalty - self.best.insertion_penalty))
        )


def test_the_best_of_the_grid_is_found() -> None:
    """Each setting's best value is chosen at the best of those before; each is decoded once."""
    best = DecodingSettings(0.2, 4, 1.25, 0.5)
    decoded = Decoded(best)
    curve = run_search(START, TuningConfig().grid(), decoded)
    assert best_of(curve).settings == best
    assert len(decoded.asked) == len(set(decoded.asked)) == 1 + 6 + 2 + 2 + 2
    assert [point.settings for point in curve] == decoded.asked
    assert curve[0].settings == START
    assert min(point.errors.errors for point in curve) == 0
    scales = [point.settings.acoustic_scale for point in curve if point.varied != "start"]
    assert scales[:6] == [0.1, 0.15, 0.2, 0.25, 0.4, 0.5]


def test_equal_errors_leave_the_recipes_settings() -> None:
    """A value without an error less replaces nothing; of equal ones the first listed is taken."""

    def none(settings: Sequence[DecodingSettings]) -> list[WordErrors]:
        return [WordErrors(reference_words=9) for _ in settings]

    assert best_of(run_search(START, TuningConfig().grid(), none)).settings == START

    def fewer_elsewhere(settings: Sequence[DecodingSettings]) -> list[WordErrors]:
        return [WordErrors(int(each.acoustic_scale == 0.3), reference_words=9) for each in settings]

    curve = run_search(START, {"acoustic_scale": (0.5, 0.1)}, fewer_elsewhere)
    assert best_of(curve).settings == replace(START, acoustic_scale=0.5)


def test_searches_of_several_models_are_counted_together() -> None:
    """Each stage asks for all models at once, and gives each what it would find alone."""
    best = {"a": DecodingSettings(0.2, 4), "b": DecodingSettings(0.3, 3), "c": START}
    counts = {name: Decoded(each) for name, each in best.items()}
    stages = []

    def count(asked):
        stages.append({name: len(settings) for name, settings in asked.items()})
        return {name: counts[name](settings) for name, settings in asked.items()}

    grid = TuningConfig().grid()
    found = search(START, grid, best, count)
    assert {name: best_of(curve).settings for name, curve in found.items()} == best
    assert stages[0] == {"a": 1, "b": 1, "c": 1}
    assert len(stages) == 5
    for name, each in best.items():
        assert found[name] == run_search(START, grid, Decoded(each))


@pytest.mark.parametrize("make", [baseline_fit, teacher_fit])
def test_newbob_reads_the_development_speakers(make) -> None:
    """Development speakers give newbob its loss, and their alignment is an input."""
    section = make.__name__.removesuffix("_fit")
    recipe = read_recipe(recipe_path("demo"), [f"{section}.schedule=newbob"])
    fit = make(recipe)
    assert fit.labelled == ALIGNMENT_STEP
    assert DEV_ALIGNMENT_STEP not in fit.inputs
    developed = fit.on_development_speakers()
    assert DEV_ALIGNMENT_STEP in developed.inputs
    assert developed.config != fit.config


@pytest.mark.parametrize("make", [baseline_fit, teacher_fit])
@pytest.mark.parametrize("schedule", ["newbob", "exponential"])
def test_sequence_training_validates_on_none(make, schedule: str) -> None:
    """Its rates decay, whatever the schedule before it."""
    section = make.__name__.removesuffix("_fit")
    recipe = read_recipe(recipe_path("demo"), [f"{section}.schedule={schedule}"])
    fit = sequence_fit(recipe, make(recipe))
    assert (fit.validation, fit.newbob, fit.validation_one_in) == ("", None, 0)


def test_other_fits_do_not_read_the_development_speakers() -> None:
    """Without newbob a fit measures no loss; the aligner trains before they are aligned."""
    recipe = read_recipe(recipe_path("demo"), ["aligner.schedule=newbob"])
    first, last = realignment_rounds(2)
    aligners = [aligner_fit(recipe, each) for each in (first, last)]
    for fit in (baseline_fit(recipe), student_fit(recipe), *aligners):
        assert fit.on_development_speakers() == fit


CHOSEN = {
    "baseline": DecodingSettings(0.25, 1, 0.8, 0.5),
    "teacher": DecodingSettings(0.75, 3, 1.25, 0.0),
    "student": DecodingSettings(0.5, 2, 1.0, 1.5),
}
DECODER = DecoderConfig(CONFIG.beam, CONFIG.max_active)


@cache
def graph_of(order: int, scale: float, penalty: float) -> DecodingGraph:
    """Build the graph of the labelled sentences, without the modules under test."""
    lexicon = toy_lexicon()
    arpa = witten_bell_arpa(SENTENCES, lexicon.pronunciations, order)
    return decoding_graph(lexicon, TREE, arpa, GrammarWeights(scale, penalty))


def graph_at(settings: DecodingSettings) -> DecodingGraph:
    """Return the graph of some settings."""
    return graph_of(settings.ngram_order, settings.language_model_scale, settings.insertion_penalty)


def grammar_at(settings: DecodingSettings) -> tuple[bytes, GrammarWeights]:
    """Return the grammar of some settings' order, and its weights."""
    lexicon = toy_lexicon()
    model = witten_bell(SENTENCES, lexicon.pronunciations, settings.ngram_order)
    weights = GrammarWeights(settings.language_model_scale, settings.insertion_penalty)
    return ngram_grammar(model, word_ids(lexicon)).to_bytes(), weights


def test_each_models_settings_decode_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished tuning gives each model its tasks, its grammar's weights, its scores' scale."""
    rows = [row(number, SENTENCES[number % 4], "s") for number in range(6)]
    run = write_oracle_run(tmp_path, monkeypatch, rows, dev=True)
    spec = StepSpec(run.store, run.run_uri, TUNING_STEP, {})
    chosen = {"settings": plain(CHOSEN)}
    run_step(spec, lambda step: step.lossless(Tally(), statistics=chosen))
    tasks: list[HypothesisTask] = []
    grammars: dict[str, set[tuple[bytes, GrammarWeights]]] = defaultdict(set)
    spread: dict[str, set[float]] = defaultdict(set)
    find, rescored = slices.find_lattice, SecondPass.rescored

    def noted(graph, scores, config):
        spread[tasks[-1].model] |= set(np.ptp(scores, axis=1).round(3).tolist())
        return find(graph, scores, config)

    def noted_second_pass(second_pass: SecondPass, found: FoundLattice) -> np.ndarray:
        weights = GrammarWeights(second_pass.scale, second_pass.insertion_penalty)
        grammars[tasks[-1].model].add((second_pass.grammar.to_bytes(), weights))
        return rescored(second_pass, found)

    def distribute(elements: Sequence[HypothesisTask], function, description: str) -> list:
        assert (function, description[:7]) == (decode_slice, "decode ")
        return [function(each) for each in elements if tasks.append(each) is None]

    monkeypatch.setattr(slices, "find_lattice", noted)
    monkeypatch.setattr(SecondPass, "rescored", noted_second_pass)
    manifest = evaluate(*run.place, CONFIG, ModelsToDecode(MODELS, distribute)).manifest
    assert Counter((each.model, each.settings) for each in tasks) == dict.fromkeys(
        CHOSEN.items(), 2
    )
    assert grammars == {name: {grammar_at(each)} for name, each in CHOSEN.items()}
    # The oracle's logits are 30 and 0, and its priors are uniform.
    assert spread == {name: {30 * each.acoustic_scale} for name, each in CHOSEN.items()}
    assert scores_of(run)["decoding"] == plain(CHOSEN)
    assert TUNING_STEP in manifest.inputs


class Mumbler(Oracle):
    """Mumbler hears the senones of utterances in noise, which differs by model."""

    def utterance_logits(self, utterances: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return logits of the oracle with noise, the same whenever the frames are the same."""
        found = []
        for frames in utterances:
            seed = zlib.crc32(self.name.encode() + frames.numpy().tobytes())
            noise = torch.from_numpy(np.random.default_rng(seed).normal(size=(len(frames), 1000)))
            signal = torch.nn.functional.one_hot(frames[:, NUM_BINS].long(), TREE.num_senones)
            loudness = {"baseline": 1.0, "teacher": 4.0, "student": 1.5}[self.name]
            found.append(loudness * signal + noise[:, : TREE.num_senones].float())
        return found


def mumbling(store: ObjectStore, run_uri: str, name: str, form: ModelConfig) -> TrainedModel:
    """Make such a model, in the place of what a run stores."""
    del store, run_uri, form
    uniform = torch.full((TREE.num_senones,), 1 / TREE.num_senones).log()
    return TrainedModel(Mumbler(name, Counter()).eval(), uniform)


def errors_at(run: OracleRun, rows: list[FeatureRow], model: str, each: DecodingSettings) -> dict:
    """Count a model's word errors at settings by a decoding of its own; a trial's plain values."""
    total = WordErrors()
    for piece in scored_pieces(rows, mumbling(*run.place[:2], model, MODELS[model])):
        found = decode(graph_at(each), each.acoustic_scale * piece.log_likelihoods, DECODER)
        total += word_errors(str(rows[piece.row].text).split(), found)
    return {**plain(total), "wer": total.word_error_rate}


def test_trials_and_evaluation_decode_at_the_settings_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noisy models err more or less by each setting; every count is that of its own settings."""
    rows = [row(number, SENTENCES[number % 4], "s", number, 3) for number in range(12)]
    run = write_oracle_run(tmp_path, monkeypatch, rows, dev=True)
    monkeypatch.setattr("training.evaluate.slices.load_model", mumbling)
    tuning = TuningConfig((0.5, 3.0), (1, 3), (0.25,), (2.0,))
    models = ModelsToDecode(MODELS, serially)
    (output,) = tune(*run.place, CONFIG, tuning, models).manifest.outputs
    curves = json.loads(read_output(run.store, run.run_uri, output))
    varied = defaultdict(set)
    for model, points in curves.items():
        for point in points:
            settings = DecodingSettings.of(point["settings"])
            assert point["word_errors"] == errors_at(run, rows, model, settings)
            varied[point["varied"]].add(point["word_errors"]["wer"])
    assert min(map(len, varied.values())) > 1
    evaluate(*run.place, CONFIG, models)
    scores, chosen = scores_of(run), tuned_settings(run.store, run.run_uri)
    assert scores["decoding"] == plain(chosen)
    assert len(set(chosen.values())) == len(MODELS)
    for model in MODELS:
        # The development speakers say what the held-out ones say.
        expected = errors_at(run, rows, model, chosen[model])
        counts = scores["word_errors"][model].values()
        for kind in ("substitutions", "insertions", "deletions", "reference_words"):
            assert sum(each[kind] for each in counts) == expected[kind]


TUNING = TuningConfig(
    acoustic_scales=(0.5,), ngram_orders=(1, 2), language_model_scales=(), insertion_penalties=()
)


def test_trials_hear_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four settings and each model: one scoring, the errors of evaluation, and a killed run's end.

    The scores are stored in several objects, and utterances in several pieces.
    """
    monkeypatch.setattr(tuning, "_MAX_STORED_SCORES", 3000)
    monkeypatch.setattr(slices, "MAX_PIECE_FRAMES", 20)
    rows = heldout_rows()[:12]
    run = write_oracle_run(tmp_path, monkeypatch, rows, dev=True)
    left = iter(range(5))

    def dies(elements, function, description):
        del description
        return [function(each) for each in elements if next(left) is not None]

    with pytest.raises(StopIteration):
        tune(*run.place, CONFIG, TUNING, ModelsToDecode(MODELS, dies))
    manifest = tune(*run.place, CONFIG, TUNING, ModelsToDecode(MODELS, serially)).manifest
    num_scored = sum(run.heard.values())
    pieces = sum(-(-each.features.shape[0] // 60) for each in rows)
    assert num_scored == len(MODELS) * pieces > len(MODELS) * len(rows)
    assert len(run.store_keys("tuning/scratch")) > 3 * (1 + 3)
    (output,) = manifest.outputs
    curves = json.loads(read_output(run.store, run.run_uri, output))
    assert {name: len(each) for name, each in curves.items()} == dict.fromkeys(MODELS, 3)
    evaluate(*run.place, CONFIG, ModelsToDecode(MODELS, serially))
    scores = scores_of(run)
    for model in MODELS:
        # The development speakers say what the held-out ones say, so their errors are the same.
        first = curves[model][0]["word_errors"]
        counts = scores["word_errors"][model].values()
        for kind in ("substitutions", "insertions", "deletions", "reference_words"):
            assert first[kind] == sum(each[kind] for each in counts)
        not_heard = [each for each in rows if each.features[0, 1] >= LISTENS_FROM[model]]
        assert first["deletions"] >= sum(len(str(each.text).split()) for each in not_heard)
    assert scores["decoding"].keys() == set(MODELS)
