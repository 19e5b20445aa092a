"""Train as one simulated rank that selects its minibatch size every so much data (004 4, 5.4)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from tests.benchmarks.trainer_tables.chunks import CHUNK_FRAMES, Minibatch
from training.distributed.simulated_group import SimulatedGroup
from training.fit.minibatch_selection import frame_accuracy, left, select_minibatch
from training.simulation import MakeTrainer, Training
from training.trainers import Trainer


@dataclass(frozen=True, slots=True)
class Selection:
    """Selection: the factors to try, and both periods in minibatches of a rank."""

    factors: tuple[int, ...]
    every: int
    trial: int


@dataclass(slots=True)
class SelectingRank:
    """SelectingRank is a rank's training, its minibatches' factor, and those since a trial."""

    model: nn.Module
    optimizer: Optimizer
    trainer: Trainer
    training: Training[Minibatch]
    selection: Selection
    factor: int = 1
    num_since: int = 0

    def train(self, minibatches: Sequence[Minibatch]) -> None:
        """Train on an epoch's minibatches, and select where it is due and enough are left."""
        place = 0
        while place < len(minibatches):
            following = minibatches[place : place + self.selection.trial]
            is_enough = len(following) == self.selection.trial
            if self.num_since >= self.selection.every and is_enough:
                self._select(following)
            taken = minibatches[place : place + self.factor]
            self._step(taken)
            place, self.num_since = place + len(taken), self.num_since + len(taken)

    def _select(self, minibatches: Sequence[Minibatch]) -> None:
        with left(self.trainer):
            found = select_minibatch(
                self.selection.factors,
                partial(self._try, minibatches),
                self.model,
                self.optimizer,
                self.trainer,
            )
        self.factor, self.num_since = found.num_frames, 0

    def _try(self, minibatches: Sequence[Minibatch], factor: int) -> float:
        with self.trainer:
            parts = range(0, len(minibatches), factor)
            correct = sum(self._step(minibatches[first : first + factor]) for first in parts)
        num_frames = CHUNK_FRAMES * sum(len(labels) for _, labels in minibatches)
        return frame_accuracy(correct, num_frames, self.trainer.group)

    def _step(self, minibatches: Sequence[Minibatch]) -> int:
        """Take a step of the sum of some minibatches; return how many frames were right."""
        correct = 0
        self.optimizer.zero_grad()
        for minibatch in minibatches:
            self.training.loss(self.model, minibatch).backward()  # type: ignore[no-untyped-call]
            inputs, labels = minibatch
            with torch.no_grad():
                correct += int((self.model(inputs).argmax(dim=2) == labels).sum())
        self.optimizer.step()
        return correct


def train_selecting(
    group: SimulatedGroup,
    training: Training[Minibatch],
    make_trainer: MakeTrainer,
    selection: Selection,
) -> tuple[nn.Module, tuple[float, ...], int]:
    """Train all epochs; return the model, its evaluations on rank 0, and the last factor."""
    model = training.make_model()
    optimizer = training.make_optimizer(model)
    trainer = make_trainer(model, optimizer, group=group)
    rank = SelectingRank(model, optimizer, trainer, training, selection)
    evaluations = []
    for epoch, rate in enumerate(training.learning_rates):
        for settings in optimizer.param_groups:
            settings["lr"] = rate
        with trainer:
            rank.train(list(training.minibatches(epoch, group.rank(), group.size())))
        if group.rank() == 0:
            evaluations.append(training.evaluate(model))
    return model, tuple(evaluations), rank.factor
