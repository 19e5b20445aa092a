"""Run steps of several runs side by side, each lane as `megahour run` would on one core."""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from infra.store.object_store import ObjectStore
from jobs.run import launches, run_steps
from jobs.run_table import (
    BOOTSTRAP,
    EXTRACT_FEATURES,
    GENERATE_TARGETS,
    INGEST,
    REALIGN,
    REPARTITION,
    SELECT_UTTERANCES,
    TRAIN_ALIGNER,
    TRAIN_BASELINE,
    TRAIN_STUDENT,
    TRAIN_TEACHER,
    written_steps,
)
from pipeline.runs.manifest import is_finished
from training.settings.recipe import read_recipe

NUM_LANES = 2
DATA_STEPS = (
    *(INGEST, SELECT_UTTERANCES, EXTRACT_FEATURES),
    *(BOOTSTRAP, TRAIN_ALIGNER, REALIGN),
)
STUDENT_STEPS = (TRAIN_TEACHER, GENERATE_TARGETS, REPARTITION, TRAIN_STUDENT)
BASELINE_STEPS = (TRAIN_BASELINE,)
TEACHER_STEPS = (TRAIN_TEACHER,)


class StepFailedError(RuntimeError):
    """StepFailedError names a lane whose step failed, and the log that says why."""


@dataclass(frozen=True, slots=True)
class Lane:
    """Lane: some steps of one run, its recipe, and ingest's arguments for placements.

    Of a run that is resumed with the settings that it began with, finished steps are not started.
    """

    run: Path
    kaldi_dir: Path
    steps: Sequence[str]
    recipe: Path
    overrides: Sequence[str]
    placements: Sequence[str] = ()
    is_resumed: bool = False

    @property
    def log(self) -> Path:
        """Return the file that all output is appended to."""
        return self.run.with_name(f"{self.run.name}-{self.steps[-1]}.log")


def run_lanes(lanes: Sequence[Lane]) -> None:
    """Run the lanes two at a time; StepFailedError once all have ended, if one failed."""
    with ProcessPoolExecutor(NUM_LANES, get_context("spawn")) as pool:
        codes = list(pool.map(_run_lane, lanes))
    for lane, code in zip(lanes, codes, strict=True):
        if code:
            raise StepFailedError(f"{lane.run}: exit code {code}: see {lane.log}")


def _run_lane(lane: Lane) -> int:
    with lane.log.open("a") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
        # One rank a model: two lanes fill two cores, and no rank waits for another.
        recipe = read_recipe(str(lane.recipe), lane.overrides)
        ingested = ["--kaldi-dir", str(lane.kaldi_dir), *lane.placements]
        every = launches(ingested, 1, 1, "cpu", recipe.alignment.rounds, recipe.targets.rounds)
        chosen = [
            each for each in every if each.step in lane.steps and not _is_done(lane, each.step)
        ]
        shared = ["--recipe", str(lane.recipe), "--run", str(lane.run)]
        return run_steps(
            chosen, shared + [part for each in lane.overrides for part in ("--set", each)]
        )


def _is_done(lane: Lane, step: str) -> bool:
    """Return whether the step has all its manifests, and the lane's settings made them.

    It would find them itself, but each start of a step costs seconds, and half a minute where the
    machine is busy.
    """
    if not lane.is_resumed:
        return False
    recipe, run_uri = read_recipe(str(lane.recipe), lane.overrides), str(lane.run)
    store = ObjectStore((run_uri,))
    return all(is_finished(store, run_uri, name) for name in written_steps(recipe, step))
