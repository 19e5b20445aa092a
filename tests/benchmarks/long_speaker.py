"""Measure the memory of a worker that extracts 24 hours of one speaker: at most 2 GiB.

`python -m tests.benchmarks.long_speaker [--hours H] [--json]` takes about a minute and 4 GB of disk
for each length of utterances.
"""

import argparse
import tempfile
from pathlib import Path

from pipeline.steps.features import MAX_SHARD_FRAMES
from tests.benchmarks.measure import Figure, show
from tests.long_speaker import measured

UTTERANCE_S = {"6 s": 6.0, "5 min": 300.0, "1 h": 3600.0}


def figures(hours: float) -> list[Figure]:
    """Return peak memory and speed for short, long and the longest utterances."""
    found = []
    for name, utterance_s in UTTERANCE_S.items():
        with tempfile.TemporaryDirectory() as folder:
            result = measured(Path(folder), hours, utterance_s, MAX_SHARD_FRAMES)
        speed = hours * 3600 / result["seconds"]
        found += [
            Figure.of(f"{name}: peak memory", [result["peak_bytes"] / 2**30], "GiB"),
            Figure.of(f"{name}: speed", [speed], "x real time"),
            Figure.of(f"{name}: shards", [result["shards"]], "shards"),
        ]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", type=float, default=24.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    title = f"{arguments.hours:g} hours of one speaker in one extraction task"
    show(title, figures(arguments.hours), arguments.json)
