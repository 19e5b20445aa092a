"""Measure how well a trainer's order is mixed when repartition mixes G source shards.

python -m tests.benchmarks.shuffle [--json]

G = 1 is the paper. A run of 256 source files (5 speakers of 32 utterances each) is written
directly: a tenth of the variance is the file's, a tenth the speaker's. Repartition, the trainer's
order on 8 ranks and the certificate are the real ones. Utterances are short, one chunk each, so a
shuffle buffer is scaled with them to hold what it holds at full size: one partition, two fifths of
a source file.
"""

import argparse
import json
import shutil
import tempfile
from dataclasses import replace
from unittest import mock

import numpy as np

from infra.store.object_store import ObjectStore
from pipeline.audit.provenance import read_provenance
from pipeline.records import Tally
from pipeline.runs.manifest import read_manifest
from pipeline.shuffle_quality import Samples, figures
from pipeline.steps.repartition import RepartitionConfig, repartition
from tests.benchmarks.measure import Figure
from tests.small_corpus import serially
from tests.written_run import write_run
from training.certificate import ProvenanceReader, TrainingStep, collect_samples, sub_epoch_steps
from training.data.dataset import Dataset
from training.data.sub_epochs import SubEpoch

NUM_FILES, NUM_SPEAKERS, NUM_EACH = 256, 5, 32
NUM_RANKS, MINIBATCH_FRAMES, LOOK_AHEAD = 8, 512, 3
PARTITIONS_A_FILE = 2.5  # 5 h in parts of 2 h
NUM_SEEDS = 3
SOURCE_SHARDS = (1, 4, 16, 64)
COLUMNS = (
    ("files/step", "effective_files", "step"),
    ("files/rank", "effective_files", "rank"),
    ("speakers/step", "effective_speakers", "step"),
    ("design effect", "design_effect", "step"),
    ("predicted", "predicted_design_effect", "step"),
    ("lag 1", "autocorrelation_1", "step"),
    ("lag 4", "autocorrelation_4", "step"),
    ("displacement", "mean_displacement", "step"),
)
SUB_EPOCH = SubEpoch(False, 0, 1, 0, False, 0.1)
Values = dict[str, float]


def main() -> None:
    """Measure all orders over several seeds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    table: dict[str, list[Values]] = {}
    for seed in range(NUM_SEEDS):
        for name, values in measure(seed).items():
            table.setdefault(name, []).append(values)
    summary = {
        name: [Figure.of(title, [each[title] for each in rows], "") for title, _, _ in COLUMNS]
        for name, rows in table.items()
    }
    print(as_json(summary) if arguments.json else as_text(summary))


def measure(seed: int) -> dict[str, Values]:
    """Return each order's figures for one seed."""
    rows: dict[str, Values] = {}
    with tempfile.TemporaryDirectory() as folder:
        store, run_uri = ObjectStore((folder,)), f"{folder}/run"
        write_run(store, run_uri, NUM_FILES, NUM_SPEAKERS, NUM_EACH, seed)
        for num_source_shards in SOURCE_SHARDS:
            samples, ranks = trainers_order(store, run_uri, num_source_shards, seed)
            rows[f"G = {num_source_shards}"] = row_of(samples, ranks)
            shutil.rmtree(f"{run_uri}/partitions")
    unshuffled = row_of(in_source_order(samples), ranks)
    uniform = row_of(samples.in_uniform_order(seed), ranks)
    return {"unshuffled, one reader": unshuffled, **rows, "uniform": uniform}


def trainers_order(
    store: ObjectStore, run_uri: str, num_source_shards: int, seed: int
) -> tuple[Samples, np.ndarray]:
    """Return a sub-epoch of 8 ranks as the trainer reads it, by step, and their minibatches."""
    hours = read_manifest(store, run_uri, "features/unlabelled").tally_out.hours
    config = RepartitionConfig(hours / NUM_FILES / PARTITIONS_A_FILE, num_source_shards, seed)
    outputs = repartition(store, run_uri, config, serially).manifest.outputs
    dataset = Dataset(store, run_uri, (), outputs, LOOK_AHEAD, MINIBATCH_FRAMES, seed, 0, NUM_RANKS)
    reader = ProvenanceReader(store, run_uri, read_provenance(store, run_uri))
    with mock.patch("training.data.row_order.BUFFER_FRAMES", low_rate_frames(outputs[0].tally)):
        steps = [
            TrainingStep(0, number, minibatches)
            for number, minibatches in enumerate(sub_epoch_steps(dataset, SUB_EPOCH, seed))
        ]
    return collect_samples(steps, reader, NUM_RANKS, len(steps))


def low_rate_frames(partition: Tally) -> int:
    """Count as a shuffle buffer does: frames of 30 ms, each utterance's look-ahead included."""
    return partition.duration_ms // 30 + partition.utterances * LOOK_AHEAD


def in_source_order(samples: Samples) -> Samples:
    """Return the same samples as they lie in the selection files."""
    order = np.argsort(samples.positions)
    columns = (samples.files, samples.speakers, samples.positions, samples.values)
    files, speakers, positions, values = (column[order] for column in columns)
    return Samples(samples.batches, files, speakers, positions, values)


def row_of(samples: Samples, ranks: np.ndarray) -> Values:
    """Lay out one row of the table."""
    found = {"step": figures(samples), "rank": figures(replace(samples, batches=ranks))}
    return {title: found[batches][name] for title, name, batches in COLUMNS}


def as_json(summary: dict[str, list[Figure]]) -> str:
    """Return median and range of each figure of each order."""
    rows = {
        name: {each.name: [each.median, each.low, each.high] for each in row}
        for name, row in summary.items()
    }
    return json.dumps({"title": __doc__.splitlines()[0], "median, low, high": rows})


def as_text(summary: dict[str, list[Figure]]) -> str:
    """Lay out a table of medians with ranges."""

    def cell(figure: Figure) -> str:
        number = "{:.0f}".format if figure.median >= 100 else "{:.2f}".format
        return f"{number(figure.median)} ({number(figure.low)}..{number(figure.high)})"

    lines = [f"{'':22}" + "".join(f"{title:>22}" for title, _, _ in COLUMNS)]
    lines += [
        f"{name:22}" + "".join(f"{cell(each):>22}" for each in row) for name, row in summary.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
