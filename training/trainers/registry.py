"""The trainer that a recipe names (003 VI, 000 2)."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from training.distributed.process_group import ProcessGroup
from training.recipes import TrainerConfig
from training.trainers import Bmuf, Gtc, Htm, Synchronous, Trainer


def make_trainer(
    config: TrainerConfig, model: nn.Module, optimizer: Optimizer, group: ProcessGroup
) -> Trainer:
    """Wrap model and optimizer; all ranks of `group` must call this together."""
    if config.name == "synchronous":
        return Synchronous(model, optimizer, group=group)
    if config.name == "gtc":
        threshold = config.gradient_threshold
        return Gtc(model, optimizer, group=group, gradient_threshold=threshold)
    blocks: Mapping[str, Any] = {
        "block_size": config.block_size,
        "block_learning_rate": config.block_learning_rate,
        "momentum_constant": config.momentum_constant,
    }
    if config.name == "bmuf":
        return Bmuf(model, optimizer, group=group, **blocks)
    return Htm(
        model,
        optimizer,
        group=group,
        group_size=config.group_size or None,
        gradient_threshold=config.gradient_threshold,
        **blocks,
    )
