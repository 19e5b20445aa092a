"""Compare targets at all offsets with those at one, and an ensemble's labels with one teacher's.

`python -m tests.benchmarks.target_costs [--rounds N] [--json]`. Seconds are of this process's CPU
time, one core, as ratios within each round. The steps run with a teacher that takes no time.
"""

import argparse
import os
import tempfile
import time
from dataclasses import replace

# Before NumPy: one core, for all sides alike.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import torch

from infra.store.object_store import ObjectStore
from jobs.planning.measurement import free_teacher
from pipeline.kbest import select_kbest
from pipeline.records import Tally
from pipeline.runs.commit import step_context
from pipeline.runs.manifest import Output
from pipeline.runs.names import PARTITIONS_STEP, TARGETS_STEP
from pipeline.shards import (
    FeatureRow,
    KBestAtAllOffsets,
    PartitionRow,
    write_features,
    write_partition,
)
from pipeline.steps.targets import FeatureHearing, ShardTask, TargetsConfig, label_shard
from tests.benchmarks.measure import Figure, interleaved, ratios, show
from tests.benchmarks.reader import kbest, read_all, utterances
from training.data.dataset import Dataset
from training.data.sub_epochs import SubEpoch
from training.targets.teacher import log_mean_posteriors, relative_logits

K, NUM_SENONES, REQUEST_FRAMES = 20, 3183, 8192
HOURS = 0.5


def rows_at(every: bool) -> list[PartitionRow]:
    """Half an hour of noise with targets of the paper's k, at one offset or at all."""
    rows = list(utterances(HOURS, NUM_SENONES, True, "float16"))
    if not every:
        return rows
    generator = np.random.default_rng(1)
    return [
        replace(
            row, targets=KBestAtAllOffsets(kbest(len(row.features) - 2, NUM_SENONES, generator))
        )
        for row in rows
    ]


def reading(folder: str, num_rounds: int) -> list[Figure]:
    """Return bytes of a partition, and CPU time of a pass, at all offsets over those at one."""
    store = ObjectStore((folder,))
    context = step_context(store, folder, PARTITIONS_STEP, {}, {})
    data = {name: write_partition(rows_at(name == "all")) for name in ("one", "all")}
    plain = Dataset(store, folder, (), (), 3, 2048, 1, 0, 1)
    chunks = SubEpoch(False, 0, 1, 0, False, 0.1)
    read = {}
    for name, written in data.items():
        output = context.put_output(name, ".parquet", written, Tally(1, 0))
        made = replace(plain, unlabelled=(output,))
        read[name] = lambda made=made: read_all(made, chunks)
    for function in read.values():
        function()
    seconds = interleaved(read, num_rounds, time.process_time)
    share = len(data["all"]) / len(data["one"])
    return [
        Figure.of("partition bytes, all / one", [share], "x"),
        Figure.of("reader's CPU time, all / one", ratios(seconds["all"], seconds["one"]), "x"),
    ]


def labelling(folder: str, num_rounds: int) -> list[Figure]:
    """Return the targets step's CPU time and bytes of a shard, without the teacher."""
    store = ObjectStore((folder,))
    features = step_context(store, folder, "features/unlabelled", {}, {}).put_output(
        "0", ".parquet", write_features([feature_row(row) for row in rows_at(False)]), Tally(1, 0)
    )
    written: dict[str, Output] = {}

    def label(offsets: str, number: int) -> None:
        config = TargetsConfig(K, REQUEST_FRAMES, 1, offsets=offsets)  # type: ignore[arg-type]
        context = step_context(store, folder, f"{TARGETS_STEP}-{offsets}-{number}", {}, {})
        task = ShardTask(context, config, "0", features, free_teacher(K), FeatureHearing())
        (written[offsets],) = label_shard(task).outputs

    numbers = iter(range(10_000))
    functions = {name: lambda name=name: label(name, next(numbers)) for name in ("one", "all")}
    seconds = interleaved(functions, num_rounds, time.process_time)
    share = written["all"].num_bytes / written["one"].num_bytes
    return [
        Figure.of("target bytes, all / one", [share], "x"),
        Figure.of(
            "targets step without teacher, all / one", ratios(seconds["all"], seconds["one"]), "x"
        ),
    ]


def feature_row(row: PartitionRow) -> FeatureRow:
    """Make the feature row of a partition's row."""
    place = row.utterance_id, row.speaker_id, row.duration_ms, "2026-01-01T00:00:00+00:00"
    return FeatureRow(*place, "a.flac", "e", None, None, row.features)


def averaging(num_rounds: int) -> list[Figure]:
    """Return what a server does for a request of an ensemble's logits, over one teacher's."""
    torch.manual_seed(1)
    members = [3 * torch.randn(2048, NUM_SENONES) for _ in range(3)]
    mean = log_mean_posteriors(members)
    seconds = interleaved(
        {
            "one": lambda: select_kbest(members[0].numpy(), K),
            "mean": lambda: select_kbest(relative_logits(mean).numpy(), K),
            "two": lambda: log_mean_posteriors(members[:2]),
            "three": lambda: log_mean_posteriors(members),
        },
        num_rounds,
        time.process_time,
    )
    names = {
        "mean": "k best of a mean / of one",
        "two": "mean of 2 / k best of one",
        "three": "mean of 3 / k best of one",
    }
    found = [Figure.of(names[n], ratios(seconds[n], seconds["one"]), "x") for n in names]
    frames = [2048 / each / 33.3 for each in seconds["one"]]
    return [Figure.of("k best of one teacher", frames, "x real time"), *found]


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = [
            *reading(folder, arguments.rounds),
            *labelling(folder, arguments.rounds),
            *averaging(arguments.rounds),
        ]
    show("targets at all offsets, and ensembles, one core", found, arguments.json)


if __name__ == "__main__":
    main()
