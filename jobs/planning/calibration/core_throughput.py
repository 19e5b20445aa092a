"""Calibration of one core: the steps of a run in miniature, and k-best selection by itself."""

import tempfile

import numpy as np

from jobs.planning.calibration.miniature_run import NUM_RECORDS, StepSeconds, run_miniature, seconds
from jobs.planning.calibration.throughputs import CoreRates
from pipeline.kbest import select_kbest
from training.recipes import Recipe

NUM_ROUNDS = 2
"""The least of several is what a step costs on a free core; the first one warms up, too."""

KBEST_FRAMES = 512


def measure_core(recipe: Recipe, utterance_seconds: float) -> CoreRates:
    """Rates of one core for this recipe, on local disk, for utterances of this length."""
    rounds = [miniature(recipe, utterance_seconds) for _ in range(NUM_ROUNDS)]
    audio_s = rounds[0].audio_seconds
    shape = KBEST_FRAMES, recipe.senones.max_senones
    logits = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    k = min(recipe.targets.k, shape[1])
    kbest = [seconds(lambda: select_kbest(logits, k)) for _ in range(NUM_ROUNDS)]
    return CoreRates(
        metadata_records_per_s=NUM_RECORDS / min(each.select_records for each in rounds),
        extraction_x_real_time=audio_s / min(each.extract for each in rounds),
        targets_x_real_time=audio_s / min(each.targets for each in rounds),
        repartition_x_real_time=audio_s / min(each.repartition for each in rounds),
        kbest_logits_per_s=logits.size / min(kbest),
    )


def miniature(recipe: Recipe, utterance_seconds: float) -> StepSeconds:
    """One run in miniature, which leaves nothing behind."""
    with tempfile.TemporaryDirectory() as folder:
        return run_miniature(folder, recipe, utterance_seconds)
