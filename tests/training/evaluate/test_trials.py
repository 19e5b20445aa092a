"""Tuning scores the development speakers once, and its trials decode what evaluation would."""

import json
from pathlib import Path

import pytest

from pipeline.runs.manifest import read_output
from tests.small_corpus import serially
from tests.training.evaluate.oracle_run import (
    CONFIG,
    LISTENS_FROM,
    MODELS,
    heldout_rows,
    scores_of,
    write_oracle_run,
)
from training.evaluate import slices, tuning
from training.evaluate.heldout import evaluate
from training.evaluate.slices import ModelsToDecode
from training.evaluate.tuning import tune
from training.settings.decoding import TuningConfig

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
