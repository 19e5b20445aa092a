"""The job `evaluate` tunes each model where the corpus has development speakers, then decodes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from infra.settings import plain
from jobs.cli import spark_steps
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import (
    BASELINE,
    DEV,
    EVALUATION_STEP,
    STUDENT,
    TEACHER,
    TUNING_STEP,
)
from tests.job_programs import RunJob
from tests.jobs.evaluable_toy_run import SETTINGS, options_of, write_evaluable_toy_run
from tests.small_corpus import plain_loop
from tests.training.targets.unlabelled_toy_run import (
    write_transcribed,
)
from tests.whole_path.processes import TINY
from training.settings.recipe import read_recipe


def test_development_speakers_settings_decode_the_heldout_ones(
    tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe's grid is tried, and its choices decode; without them the recipe's own do."""
    store, run_uri, corpus_uri = write_evaluable_toy_run(tmp_path)
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    options = options_of(run_uri, corpus_uri)

    def scored() -> tuple[list[str], dict[str, Any], int]:
        said = run_job("evaluate", *options, "--json")
        assert said.code == 0, said.err
        outputs = read_manifest(store, run_uri, EVALUATION_STEP).outputs
        (output,) = [each for each in outputs if "/scores-" in each.key]
        scores = json.loads(read_output(store, run_uri, output))
        counts = [each for model in scores["word_errors"].values() for each in model.values()]
        return list(json.loads(said.out)["manifests"]), scores, sum(c["deletions"] for c in counts)

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
