"""Measure the core and the device of this machine as a calibration."""

import platform
import tempfile
from datetime import UTC, datetime

import numpy as np

from jobs.planning.calibration.device_throughput import measure_device
from jobs.planning.calibration.miniature_run import NUM_RECORDS, StepSeconds, run_miniature, seconds
from jobs.planning.calibration.throughputs import HERE, Calibration, CoreRates, read_published
from pipeline.kbest import select_kbest
from training.settings.recipe import Recipe

NUM_ROUNDS = 2
"""Rounds of which the fastest counts, as on a free core; the first one warms up, too."""

KBEST_FRAMES = 512


def calibrate(recipe: Recipe, utterance_seconds: float) -> Calibration:
    """Measure this machine's core and device; take the rest from published figures."""
    published = read_published()
    today = datetime.now(UTC).date().isoformat()
    core = measure_core(recipe, utterance_seconds)
    device = measure_device(recipe, utterance_seconds)
    system = f"{platform.machine()} {platform.system()}, Python {platform.python_version()}"
    return Calibration(
        machine=f"{system}, {today}",
        core=core,
        store=published.store,
        devices={**published.devices, HERE: device},
        search=published.search,
        pool=published.pool,
    )


def measure_core(recipe: Recipe, utterance_seconds: float) -> CoreRates:
    """Measure one core on this recipe and this length of utterances, on local disk."""
    rounds = [_miniature(recipe, utterance_seconds) for _ in range(NUM_ROUNDS)]
    audio_s = rounds[0].audio_seconds
    shape = KBEST_FRAMES, recipe.senones.max_senones
    logits = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    columns = min(recipe.targets.k, shape[1]), recipe.targets.tail_samples
    # The miniature run has 255 senones, so k-best selection is measured apart.
    kbest = [seconds(lambda: select_kbest(logits, *columns)) for _ in range(NUM_ROUNDS)]
    return CoreRates(
        metadata_records_per_s=NUM_RECORDS / min(each.select_records for each in rounds),
        extraction_x_real_time=audio_s / min(each.extract for each in rounds),
        targets_x_real_time=audio_s / min(each.targets for each in rounds),
        repartition_x_real_time=audio_s / min(each.repartition for each in rounds),
        kbest_logits_per_s=logits.size / min(kbest),
    )


def _miniature(recipe: Recipe, utterance_seconds: float) -> StepSeconds:
    with tempfile.TemporaryDirectory() as folder:
        return run_miniature(folder, recipe, utterance_seconds)
