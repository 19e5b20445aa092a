"""Measure the cost of one-byte features: their error on AN4, and a model trained on them.

`python -m tests.benchmarks.feature_storage [--kaldi-dir DIR] [--set KEY=VALUE ...] [--json]` runs
every step up to the supervised baseline, with float16 and with uint8 (ten minutes on two cores).
"""

import argparse
import subprocess
import sys
import tempfile
from collections import defaultdict

import numpy as np

from infra.spark.session import spark_environment
from infra.store.object_store import ObjectStore
from jobs.run import launches
from pipeline.audio.decode import decode_audio
from pipeline.filterbank.log_mel import log_mel_energies
from pipeline.normalization import CausalMean
from pipeline.runs.manifest import read_manifest
from pipeline.shards import Storage, as_stored
from tests.benchmarks.an4_audio import AN4, recordings
from tests.benchmarks.measure import Figure, show

STORAGES: tuple[Storage, ...] = ("float16", "uint8")
LAST_SUB_EPOCHS = 4
"""Sub-epochs whose frames make up the accuracy: the learning rate is low by then."""


def errors() -> list[Figure]:
    """Return the differences between stored and computed features, in natural-log units."""
    _, files = recordings()
    means: defaultdict[str, CausalMean] = defaultdict(CausalMean)
    energies = [
        means[file.speaker_id].subtract(log_mel_energies(decode_audio(file.data))) for file in files
    ]
    deviation = float(np.concatenate(energies).std())
    found = [Figure.of("deviation of the features", [deviation], "log units")]
    for storage in STORAGES:
        pairs = [(as_stored(each.astype(np.float16), storage), each) for each in energies]
        error = np.concatenate([(stored - exact).ravel() for stored, exact in pairs])
        rms = float(np.sqrt(np.mean(error**2, dtype=np.float64)))
        found += [
            Figure.of(f"{storage}: rms error", [rms], "log units"),
            Figure.of(f"{storage}: largest error", [float(np.abs(error).max())], "log units"),
        ]
    return found


def trained(kaldi_dir: str, storage: Storage, settings: list[str]) -> list[Figure]:
    """Return frame accuracy and cross-entropy of a baseline trained on this storage's features."""
    with tempfile.TemporaryDirectory() as folder:
        steps = launches(kaldi_dir, 2, 2)
        last = next(
            number for number, launch in enumerate(steps) if launch.step == "train_baseline"
        )
        overrides = [f"features.storage={storage}", *settings]
        shared = ["--recipe", "recorded", "--run", folder]
        for override in overrides:
            shared += ["--set", override]
        environment = spark_environment() | {"OPENBLAS_NUM_THREADS": "1"}
        for launch in steps[: last + 1]:
            # What the steps say goes beside our figures, not among them.
            command = launch.command(shared)
            subprocess.run(command, env=environment, stdout=sys.stderr, check=True)
        store = ObjectStore((folder,))
        curve = read_manifest(store, folder, "models/baseline").statistics["curve"]
        stored = read_manifest(store, folder, "features/unlabelled")
    accuracy = [100 * sub_epoch["frame_accuracy"] for sub_epoch in curve[-LAST_SUB_EPOCHS:]]
    entropy = [sub_epoch["cross_entropy"] for sub_epoch in curve[-LAST_SUB_EPOCHS:]]
    bytes_per_hour = sum(each.num_bytes for each in stored.outputs) / stored.tally_out.hours
    return [
        Figure.of(f"{storage}: frame accuracy in training", accuracy, "%"),
        Figure.of(f"{storage}: cross-entropy in training", entropy, "nats a frame"),
        Figure.of(f"{storage}: features", [bytes_per_hour / 1e6], "MB an hour"),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kaldi-dir", default=str(AN4.parent))
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    found = errors()
    for storage in STORAGES:
        found += trained(arguments.kaldi_dir, storage, arguments.set)
    show("features as float16 and as uint8", found, arguments.json)
