"""Provide the audio that benchmarks share: AN4's FLACs beside the checkout, or noise."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.small_corpus import flac

AN4 = Path(__file__).parents[3] / "shared" / "corpora" / "an4" / "audio"
_NUM_SYNTHETIC = 300


@dataclass(frozen=True, slots=True)
class Recording:
    """Recording holds one FLAC file of a speaker."""

    utterance_id: str
    speaker_id: str
    data: bytes


def recordings() -> tuple[str, list[Recording]]:
    """Return the recordings' name, and all of them, speaker by speaker."""
    files = sorted(AN4.rglob("*.flac"))
    if not files:
        return "synthetic noise", _synthetic()
    found = [Recording(file.stem, file.parent.name, file.read_bytes()) for file in files]
    return "AN4", sorted(found, key=lambda each: (each.speaker_id, each.utterance_id))


def _synthetic() -> list[Recording]:
    generator = np.random.default_rng(0)
    durations_s = generator.uniform(1, 8, _NUM_SYNTHETIC)
    return [
        Recording(
            f"noise-{number:04d}",
            f"speaker-{number // 10:03d}",
            flac(0.1 * generator.standard_normal(round(duration_s * 16_000))),
        )
        for number, duration_s in enumerate(durations_s)
    ]
