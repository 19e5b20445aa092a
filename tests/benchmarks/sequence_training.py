"""Compare the lattices' arithmetic with the network's in a step of sMBR.

python -m tests.benchmarks.sequence_training [--json]

A minibatch of 2,048 frames in whole utterances of 2 to 6 s, lattices of ten arcs a frame (003
VII-C3), one thread. A ratio of 1 means that the host works as long on lattices as the network
works forwards and backwards; on a GPU, the GPU waits meanwhile.
"""

import argparse
import time

import numpy as np
import torch

from pipeline.shards import Lattice
from pipeline.shards.lattices import check_lattice
from pipeline.splicing import NUM_INPUTS
from tests.benchmarks.measure import Figure, interleaved, ratios, show
from training.models.lstm import LstmModel
from training.sequence_training.smbr import AlignedLattice, Smbr, SmbrBatch, smbr_loss
from training.settings.models import LstmConfig

NUM_SENONES, LOOK_AHEAD, FRAMES = 3183, 3, 2048
STATES, ARCS = 5, 10
"""Of each frame."""
NUM_ROUNDS = 5
SIZES = {"2 x 256": (2, 256), "5 x 768": (5, 768)}


def lattice(rng: np.random.Generator, num_frames: int) -> Lattice:
    """Return a lattice of five states and ten arcs a frame, all of them on whole paths."""
    sizes = np.array([1, *[STATES] * (num_frames - 1), 1], np.int32)
    first = np.cumsum(sizes) - sizes
    pairs = []
    for frame in range(num_frames):
        size, after = sizes[frame], sizes[frame + 1]
        sources, targets = np.arange(ARCS) % size, np.arange(ARCS) % after
        order = np.argsort(sources, kind="stable")
        pairs.append(np.stack([sources + first[frame], targets + first[frame + 1]])[:, order])
    sources, targets = np.concatenate(pairs, axis=1).astype(np.int32)
    labels = rng.integers(1, NUM_SENONES + 1, len(sources)).astype(np.uint16)
    costs = rng.normal(2, 1, len(sources)).astype(np.float32)
    frames = np.arange(num_frames + 1, dtype=np.int32)
    made = Lattice(sizes, frames, sources, targets, labels, costs)
    check_lattice(made, "benchmark")
    return made


def minibatch(rng: np.random.Generator) -> list[AlignedLattice]:
    """Return utterances of about FRAMES frames together."""
    utterances: list[AlignedLattice] = []
    while (left := FRAMES - sum(len(each.reference) for each in utterances)) > 66:
        num_frames = min(int(rng.integers(66, 200)), left)
        made = lattice(rng, num_frames)
        utterances.append(AlignedLattice(made, rng.integers(NUM_SENONES, size=num_frames)))
    return utterances


def main() -> None:
    """Measure, and show medians of ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(1)
    utterances = minibatch(rng)
    criterion = Smbr(0.3, 0.0, np.zeros(NUM_SENONES))
    lengths = torch.tensor([len(each.reference) + LOOK_AHEAD for each in utterances])
    batch = SmbrBatch.of(utterances, LOOK_AHEAD, criterion)
    scores = rng.normal(size=batch.cells.shape[1])
    functions = {
        "join": lambda: SmbrBatch.of(utterances, LOOK_AHEAD, criterion),
        "forward-backward": lambda: batch.expected_accuracies(scores),
    }
    for name, (num_layers, num_units) in SIZES.items():
        config = LstmConfig(num_layers, num_units, False, LOOK_AHEAD, 0.0)
        model = LstmModel(config, NUM_SENONES)
        features = torch.randn(len(utterances), int(lengths.max()), NUM_INPUTS)
        functions[name] = lambda m=model, x=features: m(x, lengths).sum().backward()
    smbr_loss(torch.zeros(len(utterances), int(lengths.max()), NUM_SENONES), batch)  # once, to warm
    seconds = interleaved(functions, NUM_ROUNDS, time.process_time)
    lattices = np.add(seconds["join"], seconds["forward-backward"]).tolist()
    milliseconds = [
        Figure.of(name, [1000 * each for each in seconds[name]], "ms") for name in functions
    ]
    shares = [Figure.of(f"lattices / {n}", ratios(lattices, seconds[n]), "") for n in SIZES]
    show("A step of sMBR, 2,048 frames, CPU seconds", [*milliseconds, *shares], arguments.json)


if __name__ == "__main__":
    main()
