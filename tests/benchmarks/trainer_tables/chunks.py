"""Classify frames of recorded or synthetic speech in chunks, by a feed-forward network or an LSTM.

The labels are the teacher's best senones of a run's training partitions, in which no transcript
takes part. Some speakers are held out, so that accuracy is that of voices not trained on.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.optim import Optimizer

from infra.store.object_store import ObjectStore, normalize_uri
from pipeline.filterbank import NUM_BINS
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import PARTITIONS_STEP
from pipeline.shards import Alignment, KBestAtAllOffsets, PartitionRow, read_partition
from pipeline.splicing import STACK, splice
from training.simulation import Training

CHUNK_FRAMES = 20
"""Paper 001 5.2 unrolls its LSTM over 21 frames; a frame here is of 30 ms."""
CONTEXT = 2
NUM_UNITS = 64
HELDOUT_SPEAKERS = 6  # of each so many, one

Network = Literal["sigmoid", "lstm"]
Minibatch = tuple[Float[Tensor, "chunks frames inputs"], Int64[Tensor, "chunks frames"]]


class ChunkModel(nn.Module):
    """ChunkModel is one hidden layer over a window of five frames, and an output layer."""

    def __init__(self, network: Network, num_senones: int) -> None:
        super().__init__()
        num_inputs = NUM_BINS * (2 * CONTEXT + 1)
        self.lstm = nn.LSTM(num_inputs, NUM_UNITS, batch_first=True) if network == "lstm" else None
        self.hidden = nn.Identity() if network == "lstm" else nn.Linear(num_inputs, NUM_UNITS)
        self.nonlinearity = nn.Identity() if network == "lstm" else nn.Sigmoid()
        self.output = nn.Linear(NUM_UNITS, num_senones)

    def forward(
        self, inputs: Float[Tensor, "chunks frames inputs"]
    ) -> Float[Tensor, "chunks frames senones"]:
        """Return logits of each frame."""
        hidden = inputs if self.lstm is None else self.lstm(inputs)[0]
        logits: Tensor = self.output(self.nonlinearity(self.hidden(hidden)))
        return logits


@dataclass(frozen=True)
class Chunks:
    """Chunks holds log-mel energies and labels of 20 frames each, with context on both sides."""

    energies: Float[Tensor, "chunks padded_frames 64"]
    labels: Int64[Tensor, "chunks frames"]

    def minibatch(self, numbers: Int64[Tensor, " chosen"]) -> Minibatch:
        """Return chunks by number; each frame has its neighbours as inputs."""
        windows = self.energies[numbers].unfold(1, 2 * CONTEXT + 1, 1)
        return windows.transpose(2, 3).flatten(2), self.labels[numbers]


@dataclass(frozen=True)
class ChunkTask:
    """ChunkTask holds the chunks to train on, and those of held-out speakers."""

    training: Chunks
    heldout: Chunks
    num_senones: int

    def accuracy(self, model: nn.Module, chunks: Chunks) -> float:
        """Return percent of the frames whose best senone is the teacher's."""
        correct = 0
        with torch.no_grad():
            for numbers in torch.split(torch.arange(len(chunks.labels)), 256):
                inputs, labels = chunks.minibatch(numbers)
                correct += int((model(inputs).argmax(dim=2) == labels).sum())
        return 100 * correct / chunks.labels.numel()

    def new_model(self, network: Network, seed: int) -> nn.Module:
        """Make a network with the random weights of a seed."""
        torch.manual_seed(seed)
        return ChunkModel(network, self.num_senones)

    def training_from(
        self,
        start: nn.Module,
        make_optimizer: Callable[[nn.Module], Optimizer],
        seed: int,
        learning_rates: tuple[float, ...],
        chunks_of_all: int,
        chunks_of_rate: int,
        step_seconds: Callable[[int, int], float],
    ) -> Training[Minibatch]:
        """Train from `start`: `chunks_of_all` are one step's of all ranks; each epoch shuffles.

        The loss is divided by `chunks_of_rate` chunks, for which the learning rates are meant.
        """

        def make_model() -> nn.Module:
            return deepcopy(start)

        def minibatches(epoch: int, rank: int, num_ranks: int) -> Iterator[Minibatch]:
            generator = torch.Generator().manual_seed(1000 * seed + epoch)
            order = torch.randperm(len(self.training.labels), generator=generator)
            own = chunks_of_all // num_ranks
            for step in range(len(order) // chunks_of_all):
                first = step * chunks_of_all + rank * own
                yield self.training.minibatch(order[first : first + own])

        def loss(model: nn.Module, minibatch: Minibatch) -> Float[Tensor, ""]:
            inputs, labels = minibatch
            logits = model(inputs).flatten(0, 1)
            total = nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
            return total / (chunks_of_rate * CHUNK_FRAMES)

        def evaluate(model: nn.Module) -> float:
            return self.accuracy(model, self.heldout)

        return Training(
            make_model, make_optimizer, minibatches, loss, evaluate, learning_rates, step_seconds
        )


def read_chunks(run: str) -> ChunkTask:
    """Read a run's training partitions; energies get the training chunks' mean and deviation."""
    run_uri = normalize_uri(run)
    store = ObjectStore((run_uri,))
    rows = [
        row
        for output in read_manifest(store, run_uri, PARTITIONS_STEP).outputs
        for row in read_partition(read_output(store, run_uri, output))
    ]
    speakers = sorted({row.speaker_id for row in rows})
    held_out = set(speakers[::HELDOUT_SPEAKERS])
    parts = [
        _chunks_of([row for row in rows if (row.speaker_id in held_out) == is_held_out])
        for is_held_out in (False, True)
    ]
    deviation, mean = torch.std_mean(parts[0].energies, dim=(0, 1))
    training, heldout = (Chunks((part.energies - mean) / deviation, part.labels) for part in parts)
    num_senones = int(max(part.labels.max() for part in parts)) + 1
    return ChunkTask(training, heldout, num_senones)


def _chunks_of(rows: list[PartitionRow]) -> Chunks:
    energies, labels = [], []
    for row in rows:
        assert not isinstance(row.targets, Alignment), "the run's targets are hard"
        offset = row.offset
        kbest = (
            row.targets.at(offset) if isinstance(row.targets, KBestAtAllOffsets) else row.targets
        )
        stacked = splice(row.features, offset).astype(np.float32)
        mean = stacked.reshape(-1, STACK, NUM_BINS).mean(axis=1)
        padded = np.pad(mean, ((CONTEXT, CONTEXT), (0, 0)), mode="edge")
        best = kbest.senones[:, 0].astype(np.int64)
        for first in range(0, len(mean) - CHUNK_FRAMES + 1, CHUNK_FRAMES):
            energies.append(padded[first : first + CHUNK_FRAMES + 2 * CONTEXT])
            labels.append(best[first : first + CHUNK_FRAMES])
    return Chunks(torch.from_numpy(np.stack(energies)), torch.from_numpy(np.stack(labels)))
