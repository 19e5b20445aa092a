"""Each model is decoded with its own tuned scales, order and penalty, and with no other's."""

import json
import zlib
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from infra.settings import plain
from infra.store.object_store import ObjectStore
from pipeline.records import Tally
from pipeline.runs.engine import StepSpec, run_step
from pipeline.runs.manifest import read_output
from pipeline.runs.names import TUNING_STEP
from pipeline.shards import FeatureRow
from tests.small_corpus import serially
from tests.training.decode.toy_language import toy_lexicon
from tests.training.evaluate.oracle_run import (
    CONFIG,
    MODELS,
    SENTENCES,
    TREE,
    Oracle,
    OracleRun,
    row,
    scores_of,
    write_oracle_run,
)
from training.decode.decoder import DecoderConfig, decode
from training.decode.graph import DecodingGraph, GrammarWeights, decoding_graph, encode_graph
from training.decode.smoothing import witten_bell_arpa
from training.evaluate import heldout
from training.evaluate.heldout import HypothesisTask, decode_slice, evaluate
from training.evaluate.slices import ModelsToDecode, scored_pieces
from training.evaluate.tuning import tune, tuned_settings
from training.evaluate.word_errors import WordErrors, word_errors
from training.models.store import TrainedModel
from training.settings.decoding import DecodingSettings, TuningConfig
from training.settings.models import ModelConfig

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


def test_each_models_settings_decode_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished tuning gives each model its tasks, its graph's weights, and its scores' scale."""
    rows = [row(number, SENTENCES[number % 4], "s") for number in range(6)]
    run = write_oracle_run(tmp_path, monkeypatch, rows, dev=True)
    spec = StepSpec(run.store, run.run_uri, TUNING_STEP, {})
    chosen = {"settings": plain(CHOSEN)}
    run_step(spec, lambda step: step.lossless(Tally(), statistics=chosen))
    tasks: list[HypothesisTask] = []
    searched: dict[str, set[bytes]] = defaultdict(set)
    spread: dict[str, set[float]] = defaultdict(set)
    search = heldout.best_path

    def noted(graph, scores, config):
        searched[tasks[-1].model].add(encode_graph(graph))
        spread[tasks[-1].model] |= set(np.ptp(scores, axis=1).round(3).tolist())
        return search(graph, scores, config)

    def distribute(elements: Sequence[HypothesisTask], function, description: str) -> list:
        assert (function, description[:7]) == (decode_slice, "decode ")
        return [function(each) for each in elements if tasks.append(each) is None]

    monkeypatch.setattr(heldout, "best_path", noted)
    manifest = evaluate(*run.place, CONFIG, ModelsToDecode(MODELS, distribute)).manifest
    assert Counter((each.model, each.settings) for each in tasks) == dict.fromkeys(
        CHOSEN.items(), 2
    )
    assert searched == {name: {encode_graph(graph_at(each))} for name, each in CHOSEN.items()}
    assert len(set().union(*searched.values())) == len(CHOSEN)
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
            signal = torch.nn.functional.one_hot(frames[:, 64].long(), TREE.num_senones)
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
