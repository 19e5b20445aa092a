"""A calibration of the machine at hand, with what is published of others."""

import platform
from datetime import UTC, datetime

from jobs.planning.calibration.core_throughput import measure_core
from jobs.planning.calibration.device_throughput import measure_device
from jobs.planning.calibration.throughputs import HERE, Calibration, read_published
from training.recipes import Recipe


def calibrate(recipe: Recipe, utterance_seconds: float) -> Calibration:
    """Measure this machine's core and device; the rest is published."""
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
    )
