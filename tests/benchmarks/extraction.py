"""Time the extraction step beside decoding and filter bank alone, and beside lhotse.

`python -m tests.benchmarks.extraction [--rounds N] [--json]`; one process, one thread of
arithmetic. Elapsed time shows what each side makes of two cores. Core time is its cost on all cores
together, GETs in flight included. Beside the step as it is, which compares the MD5 of one FLAC in
four, it runs with the MD5 of none and of all, by either filter bank. lhotse takes part if it is
installed, by its own compute-and-store on the same files.
"""

import argparse
import os

# Before NumPy: one core, for all sides alike.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import importlib.util
import io
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from unittest.mock import patch

import soundfile

from infra.store.object_store import join_uri
from pipeline.audio import decode
from pipeline.audio.decode import decode_audio
from pipeline.filterbank import NUM_BINS, SAMPLE_RATE_HZ, Engine
from pipeline.filterbank.log_mel import log_mel_energies
from pipeline.records import Utterance
from pipeline.settings import ExtractionConfig
from pipeline.steps.features import MAX_SHARD_FRAMES
from tests.benchmarks.an4_audio import Recording, recordings
from tests.benchmarks.measure import Figure, interleaved, ratios, show
from tests.long_speaker import extract, put_selection
from tests.small_corpus import local_store

GETS_IN_FLIGHT = 32


def write_corpus(folder: Path, files: list[Recording]) -> float:
    """Write audio and a selection of all of it in one file; return the seconds of audio."""
    store, run_uri, corpus_uri = local_store(folder)
    utterances = []
    for number, file in enumerate(files):
        uri = f"audio/{file.utterance_id}.flac"
        store.put(join_uri(corpus_uri, uri), file.data)
        duration_s = soundfile.info(io.BytesIO(file.data)).duration
        created_at = f"2026-01-01T{number // 3600:02d}:{number // 60 % 60:02d}:{number % 60:02d}Z"
        utterances.append(
            Utterance(file.utterance_id, file.speaker_id, duration_s, created_at, "en-US", uri)
        )
    put_selection(store, run_uri, utterances)
    return sum(utterance.duration_s for utterance in utterances)


def whole_step(folder: Path, config: ExtractionConfig) -> None:
    """Run the whole step into an empty folder."""
    _, run_uri, _ = local_store(folder)
    shutil.rmtree(Path(run_uri) / "features", ignore_errors=True)
    extract(folder, MAX_SHARD_FRAMES, config)


def with_md5_of_one_in(count: int, folder: Path, engine: Engine = "fast") -> None:
    """Run the whole step with the MD5 of one FLAC in `count`."""
    with patch.object(decode, "MD5_ONE_IN", {engine: count}):
        whole_step(folder, ExtractionConfig(GETS_IN_FLIGHT, 1, engine))


def decode_and_filter(files: list[Recording]) -> None:
    """Do the arithmetic that no extraction can leave out."""
    for file in files:
        log_mel_energies(decode_audio(file.data))


def decode_by_libflac_and_filter(files: list[Recording]) -> None:
    """Do the same with the usual decoder, without a check of its output."""
    for file in files:
        samples, _ = soundfile.read(io.BytesIO(file.data), dtype="float32")
        log_mel_energies(samples)


def lhotse_compute_and_store(folder: Path) -> Callable[[], None]:
    """Run lhotse as its users do: 64 bins at 16 kHz, its own writer, in this process."""
    import lhotse  # noqa: PLC0415 - optional
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    _, _, corpus_uri = local_store(folder)
    files = sorted(Path(corpus_uri, "audio").glob("*.flac"))
    cuts = lhotse.CutSet.from_cuts(lhotse.Recording.from_file(file).to_cut() for file in files)
    options = lhotse.FbankConfig(num_filters=NUM_BINS, sampling_rate=SAMPLE_RATE_HZ)
    extractor = lhotse.Fbank(options)

    def compute_and_store() -> None:
        shutil.rmtree(folder / "lhotse", ignore_errors=True)
        cuts.compute_and_store_features(
            extractor, folder / "lhotse", storage_type=lhotse.NumpyFilesWriter, progress_bar=False
        )

    return compute_and_store


def figures(folder: Path, files: list[Recording], num_rounds: int) -> list[Figure]:
    """Return speeds and ratios of all sides."""
    duration_s = write_corpus(folder, files)
    sides: dict[str, Callable[[], object]] = {
        "whole step": lambda: whole_step(folder, ExtractionConfig(GETS_IN_FLIGHT, 1)),
        "whole step, uint8": lambda: whole_step(
            folder, ExtractionConfig(GETS_IN_FLIGHT, 1, storage="uint8")
        ),
        "whole step, no MD5": lambda: with_md5_of_one_in(2**16, folder),
        "whole step, every MD5": lambda: with_md5_of_one_in(1, folder),
        "kaldi, no MD5": lambda: with_md5_of_one_in(2**16, folder, "kaldi"),
        "kaldi, every MD5": lambda: with_md5_of_one_in(1, folder, "kaldi"),
        "decode and filter bank alone": lambda: decode_and_filter(files),
        "the same by libFLAC": lambda: decode_by_libflac_and_filter(files),
    }
    if importlib.util.find_spec("lhotse"):
        sides["lhotse"] = lhotse_compute_and_store(folder)
    for side in sides.values():
        side()  # the first call reads files and makes tables
    core_s: dict[str, list[float]] = {name: [] for name in sides}
    elapsed_s = interleaved(
        {name: partial(_counting_cores, side, core_s[name]) for name, side in sides.items()},
        num_rounds,
    )
    return [*compared(duration_s, elapsed_s, ""), *compared(duration_s, core_s, " (core time)")]


def _counting_cores(side: Callable[[], object], core_s: list[float]) -> None:
    started = time.process_time()
    side()
    core_s.append(time.process_time() - started)


def compared(duration_s: float, seconds: Mapping[str, list[float]], clock: str) -> list[Figure]:
    """Compute multiples of real time, and the whole step as a multiple of the others."""
    found = [
        Figure.of(f"{name}{clock}", [duration_s / each for each in taken], "x real time")
        for name, taken in seconds.items()
    ]
    whole = seconds["whole step"]
    return found + [
        Figure.of(f"whole step / {name}{clock}", ratios(taken, whole), "x")
        for name, taken in seconds.items()
        if taken is not whole
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    source, files = recordings()
    with tempfile.TemporaryDirectory() as name:
        measured = figures(Path(name), files, arguments.rounds)
    show(f"extraction of {source}, one process", measured, arguments.json)
