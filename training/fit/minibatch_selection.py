"""Select the minibatch size as training matures: the largest that does not hurt (paper 004 4).

Every so much data, the next frames are trained on at several sizes, from the same state, and the
largest is taken whose training frame accuracy is not worse. More mature models, lower learning
rates and AdaGrad allow larger minibatches, and these more ranks, eq. (4).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from math import isnan

import torch
from torch import nn
from torch.optim import Optimizer

from training.checkpoints.training_state import load_whole_state, whole_state
from training.distributed import collectives
from training.distributed.process_group import ProcessGroup
from training.trainers.trainer import Trainer

HARMLESS = 0.5
"""Percent points of frame accuracy below the best that count as equal: the spread of a trial."""


@dataclass(frozen=True, slots=True)
class MinibatchSelection:
    """MinibatchSelection is the size taken, and the frame accuracy in percent of each tried one."""

    num_frames: int
    accuracies: Mapping[int, float]

    def to_json(self) -> dict[str, dict[str, float | None]]:
        """Convert the accuracies to plain values; null is a trial that diverged."""
        found = {str(size): None if isnan(each) else each for size, each in self.accuracies.items()}
        return {"accuracies": found}


def largest_harmless(accuracies: Mapping[int, float], harmless: float = HARMLESS) -> int:
    """Return the largest size within `harmless` points of the best accuracy of a smaller or equal.

    A size is taken only if all smaller ones are harmless too, so that one lucky trial decides
    nothing. NaN, of a trial that diverged, hurts.
    """
    if not accuracies:
        raise ValueError("no minibatch sizes to select from: need at least one")
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


@contextmanager
def left(trainer: Trainer) -> Iterator[None]:
    """Leave a trainer that is entered, and enter it again; an error within leaves it left."""
    trainer.__exit__(None, None, None)
    yield
    trainer.__enter__()


def frame_accuracy(num_correct: int, num_frames: int, group: ProcessGroup) -> float:
    """Return percent of the frames of all ranks that were classified right, the same on each."""
    counts = torch.tensor([num_correct, num_frames], dtype=torch.int64)
    collectives.all_reduce_sum(counts, group)
    correct, frames = (int(count) for count in counts)
    return 100 * correct / max(frames, 1)
