"""The job `evaluate` tunes each model where the corpus has development speakers, then decodes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from infra.settings import plain
from infra.store.object_store import ObjectStore
from jobs.cli import spark_steps
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import (
    ALIGNMENT_STEP,
    BASELINE,
    DEV,
    EVALUATION_STEP,
    HELDOUT,
    STUDENT,
    TEACHER,
    TUNING_STEP,
    UNLABELLED,
    features_step,
)
from tests.job_programs import RunJob
from tests.small_corpus import plain_loop
from tests.training.sequence_training.toy_run import CONFIG, TREE, put_model
from tests.training.targets.unlabelled_toy_run import (
    BIDIRECTIONAL,
    write_transcribed,
    write_unlabelled_toy_run,
)
from tests.whole_path.processes import TINY
from training.models.store import make_model
from training.settings.recipe import read_recipe

SETTINGS = (
    f"models.teacher.num_units={BIDIRECTIONAL.num_units}",
    f"models.student.num_units={CONFIG.num_units}",
    f"models.student.look_ahead={CONFIG.look_ahead}",
    # At so small a scale a search finds no word.
    "evaluation.acoustic_scale=0.001",
    "evaluation.beam=40.0",
    "tuning={acoustic_scales=[0.1], ngram_orders=[], "
    "language_model_scales=[], insertion_penalties=[2.0]}",
)


def write_evaluable_toy_run(folder: Path) -> tuple[ObjectStore, str, str]:
    """Write a run of a baseline, a teacher and a student of random weights, and speech to decode.

    Return store, run and corpus.
    """
    store, run_uri, corpus_uri = write_unlabelled_toy_run(folder)
    counts = read_manifest(store, run_uri, ALIGNMENT_STEP).statistics["senone_counts"]
    moments = read_manifest(store, run_uri, features_step(UNLABELLED)).statistics["moments"]
    for name in (BASELINE, STUDENT):
        torch.manual_seed(len(name))
        put_model(store, run_uri, name, make_model(CONFIG, TREE.num_senones), counts, moments)
    write_transcribed(store, run_uri, HELDOUT)
    return store, run_uri, corpus_uri


def test_development_speakers_settings_decode_the_heldout_ones(
    tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's grid is tried, and its choices decode; without them the recipe's own do."""
    store, run_uri, corpus_uri = write_evaluable_toy_run(tmp_path)
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    given = (f'corpus.uri="{corpus_uri}"', *SETTINGS)
    settings = [part for each in given for part in ("--set", each)]
    options = ["--recipe", str(TINY), "--run", run_uri, *settings]

    def scored() -> tuple[list[str], dict[str, Any], int]:
        said = run_job("evaluate", *options, "--json")
        assert said.code == 0, said.err
        outputs = read_manifest(store, run_uri, EVALUATION_STEP).outputs
        (output,) = [each for each in outputs if "/scores-" in each.key]
        scores = json.loads(read_output(store, run_uri, output))
        counts = [each for model in scores["word_errors"].values() for each in model.values()]
        return list(json.loads(said.out)["manifests"]), scores, sum(c["deletions"] for c in counts)

    assert run_job("build_graph", *options).code == 0
    steps, scores, untuned = scored()
    assert TUNING_STEP not in steps
    assert "decoding" not in scores
    shutil.rmtree(Path(run_uri, EVALUATION_STEP))
    write_transcribed(store, run_uri, DEV)
    steps, scores, tuned = scored()
    assert steps[:2] == [TUNING_STEP, EVALUATION_STEP]
    tuning = read_manifest(store, run_uri, TUNING_STEP)
    assert tuning.config["tuning"] == plain(read_recipe(str(TINY), list(SETTINGS)).tuning)
    assert scores["decoding"] == tuning.statistics["settings"]
    assert {name: each["acoustic_scale"] for name, each in scores["decoding"].items()} == (
        dict.fromkeys((BASELINE, TEACHER, STUDENT), 0.1)
    )
    assert tuned < untuned
