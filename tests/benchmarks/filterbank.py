"""Time the fast filter bank beside kaldi-native-fbank, asrfront and the bare FFT, on one core.

`python -m tests.benchmarks.filterbank [--rounds N] [--clock wall|process] [--json]`. Figures are
multiples of real time; the sides are interleaved. The difference between the engines is in
natural-log units, over all recordings. asrfront, where `pip install asrfront==0.2.2` was run, is
Kaldi's filter bank with a Hamming window, in C with vector instructions chosen at run time.
"""

import argparse
import importlib
import importlib.util
import os
import time
from collections.abc import Callable

# Before NumPy: one core, for all sides alike.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import scipy.fft

from pipeline.audio.decode import decode_audio
from pipeline.filterbank import NUM_BINS, SAMPLE_RATE_HZ
from pipeline.filterbank.log_mel import FFT_SAMPLES, log_mel_energies, num_frames
from tests.benchmarks.an4_audio import recordings
from tests.benchmarks.measure import Figure, interleaved, ratios, show

FFT_BLOCK_FRAMES = 256
LENGTHS_S = (1, 3, 10, 600)


def bare_fft(num_frames: int) -> None:
    """Do as many real FFTs of 512 as there are frames, in blocks, and nothing else."""
    for first in range(0, num_frames, FFT_BLOCK_FRAMES):
        scipy.fft.rfft(_FRAMES[: num_frames - first], axis=1)


_FRAMES = np.random.default_rng(0).standard_normal((FFT_BLOCK_FRAMES, FFT_SAMPLES), np.float32)


def engines() -> dict[str, Callable[[np.ndarray], object]]:
    """Return a function of a signal for each side: ours, Kaldi's, asrfront's, and the bare FFT."""
    sides: dict[str, Callable[[np.ndarray], object]] = {
        "fast": lambda signal: log_mel_energies(signal, "fast"),
        "kaldi": lambda signal: log_mel_energies(signal, "kaldi"),
    }
    if importlib.util.find_spec("asrfront") is not None:
        asrfront = importlib.import_module("asrfront.sensevoice")
        sides["asrfront"] = lambda signal: asrfront.fbank_raw(signal, n_mels=NUM_BINS)
    return {**sides, "bare FFT": lambda signal: bare_fft(num_frames(len(signal)))}


def speeds(
    name: str, signals: list[np.ndarray], num_rounds: int, clock: Callable[[], float]
) -> list[Figure]:
    """Measure the speed of all sides on these signals."""
    duration_s = sum(map(len, signals)) / SAMPLE_RATE_HZ

    def over_all(side: Callable[[np.ndarray], object]) -> Callable[[], object]:
        return lambda: [side(signal) for signal in signals]

    sides = {side: over_all(function) for side, function in engines().items()}
    seconds = interleaved(sides, num_rounds, clock)
    figures = [
        Figure.of(f"{name}: {engine}", [duration_s / each for each in taken], "x real time")
        for engine, taken in seconds.items()
    ]
    for other in [side for side in sides if side != "fast"]:
        quotients = ratios(seconds[other], seconds["fast"])
        figures.append(Figure.of(f"{name}: fast as a multiple of {other}", quotients, "x"))
    return figures


def differences(signals: list[np.ndarray]) -> list[Figure]:
    """Compare the engines over all signals, and require equal numbers of frames."""
    pairs = [(log_mel_energies(each, "fast"), log_mel_energies(each, "kaldi")) for each in signals]
    unequal = sum(fast.shape != kaldi.shape for fast, kaldi in pairs)
    found = np.concatenate([np.abs(fast - kaldi).ravel() for fast, kaldi in pairs])
    return [
        Figure.of("difference, 99.9th percentile", [float(np.quantile(found, 0.999))], "log units"),
        Figure.of("difference, largest", [float(found.max())], "log units"),
        Figure.of("utterances with other frame counts", [unequal], "utterances"),
    ]


def figures(num_rounds: int, clock: Callable[[], float]) -> tuple[str, list[Figure]]:
    """Return all figures, and the audio that they are of."""
    source, files = recordings()
    signals = [decode_audio(file.data) for file in files]
    found = speeds("all utterances", signals, num_rounds, clock)
    stream = np.resize(np.concatenate(signals), max(LENGTHS_S) * SAMPLE_RATE_HZ)
    for length_s in LENGTHS_S:
        # About as much work for each length: 10 minutes in utterances of it.
        num = max(LENGTHS_S) // length_s
        found += speeds(f"{length_s} s", np.split(stream, num), num_rounds, clock)
    return source, found + differences(signals)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=("wall", "process"), default="wall")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    clocks = {"wall": time.perf_counter, "process": time.process_time}
    source, measured = figures(arguments.rounds, clocks[arguments.clock])
    show(f"64 log-mel energies of {source}, one core", measured, arguments.json)
