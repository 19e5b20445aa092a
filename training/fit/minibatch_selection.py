"""Select the minibatch size as training matures: the largest that does not hurt (paper 004 4).

Every so much data, the next frames are trained on at several sizes, from the same state, and the
largest is taken whose training frame accuracy is not worse. More mature models, lower learning
rates and AdaGrad allow larger minibatches, and these more ranks, eq. (4). `SelectingFitting` wraps
the training loop, whose steps sum the gradients of several minibatches.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from math import isnan
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from training.checkpoints.training_state import load_whole_state, whole_state
from training.data.minibatch import Minibatch
from training.data.sub_epochs import SubEpoch
from training.distributed import collectives
from training.distributed.process_group import ProcessGroup
from training.fit.steps import RunningTotals, UncheckedNorms, take_steps
from training.fit.training_loop import Fitting, SelectedMinibatch
from training.settings.model_training import MinibatchSelectionConfig
from training.trainers.trainer import Trainer

HARMLESS = MinibatchSelectionConfig().harmless
"""Percent points of frame accuracy below the best that count as equal: the spread of a trial."""


@dataclass(frozen=True, slots=True)
class MinibatchSelection:
    """MinibatchSelection is the size taken, and the frame accuracy in percent of each tried one."""

    num_frames: int
    accuracies: Mapping[int, float]


def largest_harmless(accuracies: Mapping[int, float], harmless: float = HARMLESS) -> int:
    """Return the largest size within `harmless` points of the best accuracy of a smaller or equal.

    A size is taken only if all smaller ones are harmless too, so that one lucky trial decides
    nothing. NaN, of a trial that diverged, hurts.
    """
    sizes = sorted(accuracies)
    chosen, best = sizes[0], accuracies[sizes[0]]
    for size in sizes[1:]:
        best = max(best, accuracies[size])
        if not accuracies[size] >= best - harmless:
            break
        chosen = size
    return chosen


def select_minibatch(
    sizes: Sequence[int],
    train: Callable[[int], float],
    model: nn.Module,
    optimizer: Optimizer,
    trainer: Trainer,
    harmless: float = HARMLESS,
) -> MinibatchSelection:
    """Try each size from the state of now, and restore that; all ranks call this together.

    The trainer is left. `train` enters it, trains on the same data at a size, leaves it, and
    returns the training frame accuracy in percent, the same on all ranks. Sizes beyond the first
    that hurts are not tried. The trainer trains as `Trainer.trial` says. ValueError for sizes that
    are not ascending.
    """
    if list(sizes) != sorted(set(sizes)) or not sizes or sizes[0] < 1:
        raise ValueError(f"minibatch sizes {list(sizes)}: need ascending numbers of frames, from 1")
    before = deepcopy(whole_state(model, optimizer, trainer))
    accuracies: dict[int, float] = {}
    for size in sizes:
        try:
            with trainer.trial():
                accuracies[size] = train(size)
        except FloatingPointError:  # on all ranks alike
            accuracies[size] = float("nan")
        load_whole_state(deepcopy(before), model, optimizer, trainer)
        if largest_harmless(accuracies, harmless) != size:
            break
    return MinibatchSelection(largest_harmless(accuracies, harmless), accuracies)


def frame_accuracy(num_correct: int, num_frames: int, group: ProcessGroup) -> float:
    """Return percent of the frames of all ranks that were classified right, the same on each."""
    counts = torch.tensor([num_correct, num_frames], dtype=torch.int64)
    collectives.all_reduce_sum(counts, group)
    correct, frames = (int(count) for count in counts)
    return 100 * correct / max(frames, 1)


class SelectingFitting(Fitting):
    """SelectingFitting trains as `Fitting` does, and selects the minibatch size as it goes."""

    def train_on(self, minibatches: Iterator[Minibatch], sub_epoch: SubEpoch) -> None:
        """Train on the minibatches that are left of the sub-epoch; select where it is due."""
        while self.progress.cursor.num_steps_left:
            if self._is_due():
                minibatches = self._select(minibatches, sub_epoch)
            self.advance(minibatches, sub_epoch, self._is_due)

    def end(self, sub_epoch: SubEpoch, facts: dict[str, Any]) -> None:
        """Add the sub-epoch and its trials to the curve, and save."""
        trials, self.progress.minibatch.trials = self.progress.minibatch.trials, []
        super().end(sub_epoch, {"minibatch_trials": trials, **facts})

    def _is_due(self) -> bool:
        """Return whether to try sizes now; defer if too few steps of the sub-epoch remain."""
        config, cursor = self.fit.training.minibatch_selection, self.progress.cursor
        if not config.is_due(self.progress.minibatch.num_frames):
            return False
        needed = config.num_trial_minibatches(self.frames_of_all)
        # A sub-epoch that is shorter than a trial is tried as a whole.
        is_whole = cursor.num_steps == 0 and cursor.num_steps_left >= config.factors[-1]
        return cursor.num_steps_left >= needed or is_whole

    def _select(self, minibatches: Iterator[Minibatch], sub_epoch: SubEpoch) -> Iterator[Minibatch]:
        """Try each size on the minibatches that follow; return these again, and the rest.

        Leaving the trainer for it ends a block. It follows from the state alone, so that a training
        that is resumed before it selects alike.
        """
        config, frames = self.fit.training.minibatch_selection, self.fit.training.minibatch_frames
        needed = config.num_trial_minibatches(self.frames_of_all)
        num_minibatches = min(needed, self.progress.cursor.num_steps_left)
        tried = list(islice(minibatches, num_minibatches))
        self.count_exchanges()
        self.trainer.__exit__(None, None, None)
        self.norms.check()
        found = select_minibatch(
            [factor * frames for factor in config.factors],
            partial(self._try, tried, num_minibatches, sub_epoch),
            self.model,
            self.optimizer,
            self.trainer,
            config.harmless,
        )
        self.trainer.__enter__()
        # What trials sent is undone, and not counted as the sub-epoch's.
        self.statistics = self.trainer.statistics()
        # Null is a trial that diverged.
        accuracies = {
            str(size): None if isnan(each) else each for size, each in found.accuracies.items()
        }
        trial = {"frames": found.num_frames, "accuracies": accuracies}
        trials = [*self.progress.minibatch.trials, trial]
        self.progress.minibatch = SelectedMinibatch(found.num_frames // frames, 0, trials)
        return chain(tried, minibatches)

    def _try(
        self, minibatches: Sequence[Minibatch], num_minibatches: int, sub_epoch: SubEpoch, size: int
    ) -> float:
        """Train on the minibatches at a size; return percent of all ranks' frames right."""
        factor, totals = size // self.fit.training.minibatch_frames, RunningTotals()
        self.set_rate(sub_epoch.learning_rate)
        with self.trainer:
            steps = take_steps(
                self.model,
                self.optimizer,
                iter(minibatches),
                -(-num_minibatches // factor),
                self.fit.training,
                UncheckedNorms(),
                self.compute,
                factor,
            )
            for result in steps:
                totals.add(result)
                self.set_rate(sub_epoch.learning_rate)
        total = totals.read()
        return frame_accuracy(total.num_correct, total.num_frames, self.group)
