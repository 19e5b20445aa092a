"""Extract one speaker's long stream in a process of its own, and measure its memory.

`python -m tests.long_speaker FOLDER MAX_SHARD_FRAMES` extracts the selection there and prints JSON.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from infra.store.object_store import ObjectStore, join_uri
from pipeline.records import Tally, Utterance
from pipeline.runs.manifest import Manifest, Output, manifest_uri, sha256
from pipeline.settings import ExtractionConfig
from pipeline.steps.features import FileTask, extract_features, extract_file
from tests.small_corpus import flac, local_store

T = TypeVar("T")
R = TypeVar("R")

NUM_OBJECTS = 3
"""Recordings that the metadata records name in turn."""


def write_speaker(folder: Path, hours: float, utterance_s: float) -> None:
    """Write a selection of one speaker: many records, few recordings."""
    store, run_uri, corpus_uri = local_store(folder)
    generator = np.random.default_rng(0)
    for number in range(NUM_OBJECTS):
        noise = generator.standard_normal(round(utterance_s * 16_000), dtype=np.float32)
        noise *= 0.1
        store.put(join_uri(corpus_uri, f"audio/{number}.flac"), flac(noise))
    first = Utterance("", "speaker", utterance_s, "2026-01-01T00:00:00+00:00", "en-US", "")
    utterances = [
        replace(
            first,
            utterance_id=f"utterance-{number:06d}",
            audio_uri=f"audio/{number % NUM_OBJECTS}.flac",
        )
        for number in range(round(hours * 3600 / utterance_s))
    ]
    put_selection(store, run_uri, utterances)


def put_selection(store: ObjectStore, run_uri: str, utterances: Sequence[Utterance]) -> None:
    """Write the manifest of a selection whose one file holds `utterances`."""
    data = "".join(utterance.to_json() + "\n" for utterance in utterances).encode()
    store.put(join_uri(run_uri, "selection/unlabelled/file.jsonl"), data)
    tally = Tally.of(utterances)
    output = Output(
        "selection/unlabelled/file.jsonl",
        len(data),
        sha256(data),
        tally.utterances,
        tally.duration_ms,
    )
    manifest = Manifest("selection/unlabelled", {}, {}, (output,), tally_in=tally, tally_out=tally)
    store.put(manifest_uri(run_uri, manifest.step), manifest.to_bytes())


def serially_cut(
    max_shard_frames: int, elements: Sequence[Any], function: Callable[[Any], Any], description: str
) -> list[Any]:
    """Extract files one after the other, with shards cut at `max_shard_frames`."""
    del description
    return [
        extract_file(each, max_shard_frames) if isinstance(each, FileTask) else function(each)
        for each in elements
    ]


def extract(folder: Path, max_shard_frames: int, config: ExtractionConfig) -> Manifest:
    """Extract the selection that `write_speaker` or `put_selection` wrote."""
    store, run_uri, corpus_uri = local_store(folder)
    distribute: Callable[..., Any] = partial(serially_cut, max_shard_frames)
    return extract_features(
        store, run_uri, "unlabelled", corpus_uri, config, 0.0, distribute
    ).manifest


def measured(
    folder: Path, hours: float, utterance_s: float, max_shard_frames: int
) -> dict[str, float]:
    """Return seconds, peak memory in bytes and number of shards of the extraction."""
    write_speaker(folder, hours, utterance_s)
    arguments = [str(folder), str(max_shard_frames)]
    command = [sys.executable, "-m", "tests.long_speaker", *arguments]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def peak_bytes() -> int:
    """Return this process's largest resident set; getrusage would include its parent's."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    started = time.perf_counter()
    finished = extract(Path(sys.argv[1]), int(sys.argv[2]), ExtractionConfig(32, 1))
    figures = {
        "seconds": time.perf_counter() - started,
        "peak_bytes": peak_bytes(),
        "shards": len(finished.outputs),
    }
    print(json.dumps(figures))
