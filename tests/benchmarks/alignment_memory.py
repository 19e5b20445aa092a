"""Measure the memory of scoring a shard at once and in batches, and of the bootstrap, by hours.

python -m tests.benchmarks.alignment_memory [--hours 0.25,0.5] [--json]

Each value is the peak of a process of its own, less that of one that does nothing. The network has
one small layer and 3,183 senones, so that its scores are what takes the memory.
"""

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping

import numpy as np
import torch

from pipeline.shards import FeatureRow
from pipeline.splicing import num_low_rate_frames
from tests.benchmarks.measure import Figure, show
from tests.training.align.labelled_run import row
from tests.training.decode.toy_language import toy_lexicon
from training.align.bootstrap import align_rows
from training.align.network_alignment import MAX_PADDED_FRAMES, length_batches, log_likelihoods
from training.models.lstm import LstmModel
from training.models.store import TrainedModel
from training.settings.decoding import BootstrapConfig, TreeConfig
from training.settings.models import LstmConfig

NUM_SENONES = 3183
SHORTEST_S, LONGEST_S = 1.0, 10.0
SENTENCE = "see a cab be sake bee a cabs see sake"


def shard(hours: float) -> list[FeatureRow]:
    """Return noise of so many hours, in utterances of 1 to 10 s of ten words at most."""
    generator = np.random.default_rng(0)
    rows: list[FeatureRow] = []
    left = round(hours * 360_000)
    while left > 0:
        frames = int(generator.uniform(SHORTEST_S, LONGEST_S) * 100)
        features = generator.standard_normal((frames, 64), np.float32).astype(np.float16)
        words = " ".join(SENTENCE.split()[: max(frames // 100, 1)])
        rows.append(row(f"u{len(rows)}", f"s{len(rows) // 50}", features, words))
        left -= frames
    return rows


def network() -> TrainedModel:
    """Return an untrained network with as many senones as the paper's."""
    config = LstmConfig(1, 32, bidirectional=False, look_ahead=3, dropout=0.0)
    return TrainedModel(LstmModel(config, NUM_SENONES).eval(), torch.zeros(NUM_SENONES))


def at_once(hours: float) -> None:
    """Score all rows as one padded batch."""
    log_likelihoods(shard(hours), network(), 0.3)


def in_batches(hours: float) -> None:
    """Score the rows in the batches in which they are aligned."""
    rows, trained = shard(hours), network()
    lengths = [num_low_rate_frames(len(each.features), 0) for each in rows]
    for batch in length_batches(lengths, MAX_PADDED_FRAMES):
        log_likelihoods([rows[position] for position in batch], trained, 0.3)


def bootstrap(hours: float) -> None:
    """Align the rows by monophones, once, and grow a tree."""
    config = BootstrapConfig(num_iterations=1, max_gaussians=1)
    align_rows(shard(hours), toy_lexicon(), config, TreeConfig(20, 200))


WORK: Mapping[str, Callable[[float], object]] = {
    "rows alone": shard,
    "scores at once": at_once,
    "scores in batches": in_batches,
    "bootstrap": bootstrap,
}


def peak_mebibytes(name: str, hours: float) -> float:
    """Return the peak memory of a process of its own that does this work."""
    command = [sys.executable, "-m", "tests.benchmarks.alignment_memory", "--child", name]
    done = subprocess.run(
        [*command, "--hours", str(hours)], check=True, capture_output=True, text=True
    )
    return float(done.stdout.split()[-1])


def main() -> None:
    """Print the peaks above those of a process that does nothing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hours", default="0.25,0.5")
    parser.add_argument("--child", choices=tuple(WORK), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.child:
        torch.set_num_threads(1)
        WORK[arguments.child](float(arguments.hours))
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return
    idle = peak_mebibytes("rows alone", 0)
    figures = [
        Figure.of(f"{name}, {hours} h", [peak_mebibytes(name, float(hours)) - idle], "MiB")
        for name in WORK
        for hours in arguments.hours.split(",")
    ]
    show("Memory of alignment", figures, arguments.json)


if __name__ == "__main__":
    main()
