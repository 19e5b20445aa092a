"""A failing line of a task is at most twelve frames of ours from the command that runs it."""

import traceback
from pathlib import Path

import pytest

from jobs.cli import spark_steps
from pipeline.steps import features
from tests.job_programs import RunJob
from tests.pipeline.steps.increments.nights import Nights
from tests.small_corpus import plain_loop
from tests.whole_path.processes import REPOSITORY, TINY

PACKAGES = ("jobs", "training", "pipeline", "infra")
MOST_FRAMES = 12


class PlantedError(Exception):
    """PlantedError is no error that a command turns into a message."""


def test_a_failing_line_is_near_its_command(
    tmp_path: Path, run_job: RunJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guide of the pipeline shows these frames."""
    monkeypatch.setattr(spark_steps, "distribute_on_spark", plain_loop)
    nights = Nights.at(str(tmp_path))
    nights.add(1, ["ann"])
    options = ("--recipe", str(TINY), "--run", nights.run_uri("a"))
    options += ("--set", f"corpus.uri={nights.corpus_uri}")
    assert run_job("select_utterances", *options).code == 0

    def fail(*_: object) -> None:
        raise PlantedError

    monkeypatch.setattr(features, "audio_objects", fail)
    with pytest.raises(PlantedError) as caught:
        run_job("extract_features", *options)
    found = []
    for frame in traceback.extract_tb(caught.tb):
        place = Path(frame.filename)
        if place.is_relative_to(REPOSITORY):
            place = place.relative_to(REPOSITORY)
            if place.parts[0] in PACKAGES:
                found.append(f"{place}, in {frame.name}")
    assert found[0] == "jobs/extract_features.py, in <module>"
    assert found[-1] == "pipeline/steps/features.py, in extract_file"
    assert len(found) <= MOST_FRAMES, "\n".join(found)
    guide = (REPOSITORY / "pipeline" / "README.md").read_text()
    assert "\n".join(found) in guide, "\n".join(found)
