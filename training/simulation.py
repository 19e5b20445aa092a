"""Simulate training on 1 to 128 ranks in one process: a trainer's accuracy without a cluster.

htm = partial(Htm, group_size=8, block_size=50, gradient_threshold=2 / 2048)
outcome = simulate(training, 128, htm)
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from training.distributed.simulated_group import (
    AT_ONCE,
    SimulatedGroup,
    SimulatedLink,
    shared_device,
    simulate_ranks,
)
from training.trainers import Trainer
from training.trainers.decentralized import OwnModels

Minibatch = TypeVar("Minibatch")
MakeTrainer = Callable[..., Trainer]
"""A trainer's class, or a `functools.partial` of it that fixes its settings."""

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Training(Generic[Minibatch]):
    """Training is what every rank does, written as for a single process.

    `minibatches(epoch, rank, num_ranks)` is a rank's part of an epoch, equally many on all ranks;
    gradients of `loss` are summed over ranks; `learning_rates` are those of the epochs.
    `step_seconds(rank, step)` is what a rank's step takes in virtual time, without exchanges.
    """

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], Optimizer]
    minibatches: Callable[[int, int, int], Iterable[Minibatch]]
    loss: Callable[[nn.Module, Minibatch], Tensor]
    evaluate: Callable[[nn.Module], float]
    learning_rates: Sequence[float]
    step_seconds: Callable[[int, int], float] = lambda rank, step: 0.0  # noqa: ARG005


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome: the trained model, the same on all ranks, and its evaluation after each epoch.

    `seconds` is the virtual time at which rank 0 had taken an epoch's steps and left the trainer.
    """

    model: nn.Module
    evaluations: tuple[float, ...]
    seconds: tuple[float, ...]


def simulate(
    training: Training[Minibatch],
    num_ranks: int,
    make_trainer: MakeTrainer,
    device: torch.device = CPU,
    link: SimulatedLink = AT_ONCE,
) -> Outcome:
    """Train on `num_ranks` ranks, one running at a time; on a CPU the bits are those of real ranks.

    On a GPU all ranks' models lie there, and their kernels run side by side. Tensors of minibatches
    (themselves, or in tuples, lists and dictionaries) are copied there while earlier steps run; the
    rest of `training` is called with models and tensors of that device. To evaluate, ranks leave
    the trainer and enter it again, which ends a partial block; of models of each rank's own the
    mean is evaluated, and no rank leaves before the end. In virtual time a step takes
    `training.step_seconds`, and an exchange what `link` takes.
    """
    shared = shared_device(device)
    arguments = (training, make_trainer, device)
    outcome, *_ = simulate_ranks(num_ranks, train_rank, *arguments, device=shared, link=link)
    return outcome


def train_rank(
    group: SimulatedGroup,
    training: Training[Minibatch],
    make_trainer: MakeTrainer,
    device: torch.device,
) -> Outcome:
    """Train as one rank of a simulated group; rank 0 evaluates."""
    model = training.make_model().to(device)
    optimizer = training.make_optimizer(model)
    trainer = make_trainer(model, optimizer, group=group)
    evaluations, seconds, steps = [], [], count()
    # Leaving gives the global model; own models would meet at their mean, and train on from it.
    stays = isinstance(trainer, OwnModels)
    with trainer if stays else nullcontext():
        for epoch, learning_rate in enumerate(training.learning_rates):
            for settings in optimizer.param_groups:
                settings["lr"] = learning_rate
            minibatches = training.minibatches(epoch, group.rank(), group.size())
            with nullcontext() if stays else trainer:
                for minibatch in copied_ahead(minibatches, device):
                    optimizer.zero_grad()
                    training.loss(model, minibatch).backward()  # type: ignore[no-untyped-call]
                    group.advance(training.step_seconds(group.rank(), next(steps)))
                    optimizer.step()
                    group.pass_turn()
            seconds.append(group.now())
            evaluated = model
            if isinstance(trainer, OwnModels):  # the mean of all ranks' parameters
                evaluated = copy.deepcopy(model)
                evaluated.load_state_dict(trainer.mean_model(), strict=False)
            if group.rank() == 0:
                evaluations.append(training.evaluate(evaluated))
    return Outcome(model, tuple(evaluations), tuple(seconds))


def copied_ahead(minibatches: Iterable[Minibatch], device: torch.device) -> Iterator[Minibatch]:
    """Yield minibatches on `device`: each is copied before the step that precedes its own."""
    if device.type == "cpu":
        yield from minibatches
        return

    def copy(values: Tensor) -> Tensor:
        # The host would wait for a copy from memory that is not pinned.
        is_pinned = device.type == "cuda" and values.device.type == "cpu"
        return (values.pin_memory() if is_pinned else values).to(device, non_blocking=True)

    # Copies wait in the rank's stream, behind the last step and beside other ranks' steps.
    copies = (tree_map_only(Tensor, copy, minibatch) for minibatch in minibatches)
    ready = next(copies, None)
    while ready is not None:
        following = next(copies, None)
        yield ready
        ready = following
