"""Simulate training on 1 to 128 ranks in one process: a trainer's accuracy without a cluster.

htm = partial(Htm, group_size=8, block_size=50, gradient_threshold=2 / 2048)
outcome = simulate(training, 128, htm)
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from training.distributed.process_group import ProcessGroup
from training.distributed.simulated_group import simulate_ranks
from training.trainers import Trainer

Minibatch = TypeVar("Minibatch")
MakeTrainer = Callable[..., Trainer]
"""A trainer's class, or a `functools.partial` of it that fixes its settings."""


@dataclass(frozen=True, slots=True)
class Training(Generic[Minibatch]):
    """Training is what every rank does, written as for a single process.

    `minibatches(epoch, rank, num_ranks)` is a rank's part of an epoch, equally many on all ranks;
    gradients of `loss` are summed over ranks; `learning_rates` are those of the epochs.
    """

    make_model: Callable[[], nn.Module]
    make_optimizer: Callable[[nn.Module], Optimizer]
    minibatches: Callable[[int, int, int], Iterable[Minibatch]]
    loss: Callable[[nn.Module, Minibatch], Tensor]
    evaluate: Callable[[nn.Module], float]
    learning_rates: Sequence[float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome: the trained model, the same on all ranks, and its evaluation after each epoch."""

    model: nn.Module
    evaluations: tuple[float, ...]


def simulate(training: Training[Minibatch], num_ranks: int, make_trainer: MakeTrainer) -> Outcome:
    """Train on `num_ranks` ranks, one running at a time; the bits are those of real ranks.

    To evaluate, ranks leave the trainer and enter it again, which ends a partial block.
    """
    outcome, *_ = simulate_ranks(num_ranks, train_rank, training, make_trainer)
    return outcome


def train_rank(
    group: ProcessGroup, training: Training[Minibatch], make_trainer: MakeTrainer
) -> Outcome:
    """Train as one rank of a group of simulated or of real ranks; rank 0 evaluates."""
    model = training.make_model()
    optimizer = training.make_optimizer(model)
    trainer = make_trainer(model, optimizer, group=group)
    evaluations = []
    for epoch, learning_rate in enumerate(training.learning_rates):
        for settings in optimizer.param_groups:
            settings["lr"] = learning_rate
        # Leaving after each epoch gives the global model, which is the one to evaluate.
        with trainer:
            for minibatch in training.minibatches(epoch, group.rank(), group.size()):
                optimizer.zero_grad()
                training.loss(model, minibatch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        if group.rank() == 0:
            evaluations.append(training.evaluate(model))
    return Outcome(model, tuple(evaluations))
