"""Classify frames of a demo run's corpus: the teacher's best senones, by a small network."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor, nn

from infra.store.object_store import ObjectStore, join_uri, normalize_uri
from jobs.cli.job import recipe_path
from pipeline.filterbank import NUM_BINS
from pipeline.kbest import KBest
from pipeline.runs.manifest import read_manifest, read_output
from pipeline.runs.names import ALIGNMENT_STEP, HELDOUT, PARTITIONS_STEP, features_step
from pipeline.shards import read_partition
from pipeline.splicing import STACK, low_rate_alignment, splice
from training.align.labelled import read_lexicon, read_shards
from training.align.network_alignment import network_alignments, read_tree
from training.models.store import load_model
from training.settings.recipe import read_recipe
from training.simulation import Training

CONTEXT = 2  # low-rate frames to either side
NUM_UNITS = 48
MINIBATCH_FRAMES = 64
ACOUSTIC_SCALE = 0.25
PRETRAINING_PART, PRETRAINING_EPOCHS, PRETRAINING_RATE = 8, 6, 0.1
EVALUATED_AT_ONCE = 8192
Utterance = tuple[Float[np.ndarray, "_frames 192"], Int64[np.ndarray, " _frames"]]
Minibatch = tuple[Float[Tensor, "frames inputs"], Int64[Tensor, " frames"]]


@dataclass(frozen=True)
class Frames:
    """Frames holds log-mel energies at low rate, and the places of the labelled frames."""

    energies: Float32[Tensor, "padded_frames 64"]
    positions: Int64[Tensor, " frames"]
    labels: Int64[Tensor, " frames"]

    @classmethod
    def of(cls, utterances: Iterable[Utterance]) -> "Frames":
        """Average each stack of three; pad utterances, so that none is another's context."""
        energies, positions, labels, start = [], [], [], 0
        for stacked, senones in utterances:
            mean = stacked.astype(np.float32).reshape(-1, STACK, NUM_BINS).mean(axis=1)
            energies.append(np.pad(mean, ((CONTEXT, CONTEXT), (0, 0)), mode="edge"))
            positions.append(start + CONTEXT + np.arange(len(mean)))
            labels.append(senones)
            start += len(energies[-1])
        arrays = (np.concatenate(each) for each in (energies, positions, labels))
        return cls(*(torch.from_numpy(array) for array in arrays))

    def minibatch(self, numbers: Int64[Tensor, " frames"]) -> Minibatch:
        """Return frames by number, each with its neighbours, and their labels."""
        around = self.positions[numbers].unsqueeze(1) + torch.arange(-CONTEXT, CONTEXT + 1)
        return self.energies[around].flatten(1), self.labels[numbers]


@dataclass(frozen=True)
class Task:
    """Task holds frames of the unlabelled speakers to train on, and held-out frames to evaluate."""

    training: Frames
    heldout: Frames
    num_senones: int

    def pretrained(self, seed: int) -> nn.Module:
        """Train one rank on an eighth of the frames (000 3.2: 250 of 2000 hours)."""
        torch.manual_seed(seed)
        model = self.new_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=PRETRAINING_RATE)
        for _ in range(PRETRAINING_EPOCHS):
            order = torch.randperm(len(self.training.labels) // PRETRAINING_PART)
            for numbers in torch.split(order, MINIBATCH_FRAMES):
                optimizer.zero_grad()
                loss(model, self.training.minibatch(numbers)).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return model

    def new_model(self) -> nn.Module:
        """Make a network of one hidden layer."""
        inputs = nn.Linear(NUM_BINS * (2 * CONTEXT + 1), NUM_UNITS)
        return nn.Sequential(inputs, nn.ReLU(), nn.Linear(NUM_UNITS, self.num_senones))

    def frame_accuracy(self, model: nn.Module) -> float:
        """Return percent of the held-out frames whose best senone is the aligned one."""
        num_frames = len(self.heldout.labels)
        device = next(model.parameters()).device
        correct = 0
        with torch.no_grad():
            for numbers in torch.split(torch.arange(num_frames), EVALUATED_AT_ONCE):
                inputs, labels = self.heldout.minibatch(numbers)
                best = model(inputs.to(device)).argmax(dim=1)
                correct += int((best == labels.to(device)).sum())
        return 100 * correct / num_frames

    def training_from(
        self, start: nn.Module, seed: int, learning_rates: tuple[float, ...]
    ) -> Training[Minibatch]:
        """Train by plain SGD; an epoch shards all frames by minibatch over the ranks."""

        def make_model() -> nn.Module:
            model = self.new_model()
            model.load_state_dict(start.state_dict())
            return model

        def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=learning_rates[0])

        @lru_cache(maxsize=1)
        def order(epoch: int) -> Int64[Tensor, " frames"]:
            generator = torch.Generator().manual_seed(1000 * seed + epoch)
            return torch.randperm(len(self.training.labels), generator=generator)

        def minibatches(epoch: int, rank: int, num_ranks: int) -> Iterator[Minibatch]:
            num_steps = len(order(epoch)) // (MINIBATCH_FRAMES * num_ranks)
            for step in range(num_steps):
                first = (step * num_ranks + rank) * MINIBATCH_FRAMES
                yield self.training.minibatch(order(epoch)[first : first + MINIBATCH_FRAMES])

        return Training(
            make_model, make_optimizer, minibatches, loss, self.frame_accuracy, learning_rates
        )


def loss(model: nn.Module, minibatch: Minibatch) -> Float[Tensor, ""]:
    """Return the cross-entropy, a sum over frames divided by the nominal minibatch."""
    inputs, labels = minibatch
    total = nn.functional.cross_entropy(model(inputs), labels, reduction="sum")
    return total / MINIBATCH_FRAMES


def read_task(run: str) -> Task:
    """Read a finished demo run; energies get the training frames' mean and deviation."""
    run_uri = normalize_uri(run)
    store = ObjectStore((run_uri,))
    training = Frames.of(_taught(store, run_uri))
    heldout = Frames.of(_aligned(store, run_uri))
    deviation, mean = torch.std_mean(training.energies, dim=0)
    for frames in (training, heldout):
        frames.energies.sub_(mean).div_(deviation)
    return Task(
        training, heldout, read_manifest(store, run_uri, ALIGNMENT_STEP).statistics["num_senones"]
    )


def _taught(store: ObjectStore, run_uri: str) -> Iterator[Utterance]:
    for output in read_manifest(store, run_uri, PARTITIONS_STEP).outputs:
        for row in read_partition(read_output(store, run_uri, output)):
            assert isinstance(row.targets, KBest)
            yield splice(row.features, row.offset), row.targets.senones[:, 0].astype(np.int64)


def _aligned(store: ObjectStore, run_uri: str) -> Iterator[Utterance]:
    """Align held-out utterances with their transcripts by the teacher, as jobs.evaluate does."""
    rows = [
        row
        for shard in read_shards(store, run_uri, features_step(HELDOUT)).values()
        for row in shard
    ]
    form = read_recipe(recipe_path("demo")).models.teacher
    teacher, tree = load_model(store, run_uri, "teacher", form), read_tree(store, run_uri)
    lexicon = read_lexicon(store, run_uri, join_uri(run_uri, "corpus"), []).parse()
    found = network_alignments(rows, teacher, lexicon, tree, ACOUSTIC_SCALE)
    for row in rows:
        senones = found[row.utterance_id]
        if not isinstance(senones, str):
            yield splice(row.features, 0), low_rate_alignment(senones, 0).astype(np.int64)
