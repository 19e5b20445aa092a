"""Make the trainer and the optimizer that a recipe names.

All optimizers are torch's fused ones: one pass over the weights, 4 to 10 % of a small model's step.
A checkpoint says of itself whether its optimizer was fused.
"""

from collections.abc import Iterable
from importlib import import_module

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, Adam, AdamW, Optimizer

from training.settings.trainers import AdamwConfig, OptimizerConfig, SgdConfig, TrainerConfig
from training.trainers.trainer import Trainer, fields_of


def make_trainer(
    config: TrainerConfig, model: nn.Module, optimizer: Optimizer, group: ProcessGroup
) -> Trainer:
    """Wrap model and optimizer; all ranks of `group` must call this together."""
    module, _, name = config.trainer.partition(":")
    trainer: type[Trainer] = getattr(import_module(module), name)
    return trainer(model, optimizer, group=group, **fields_of(config))


def make_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make the optimizer of a recipe; the training loop sets its learning rate."""
    if isinstance(config, SgdConfig):
        return SGD(parameters, momentum=config.momentum, fused=True)
    betas = config.beta1, config.beta2
    if isinstance(config, AdamwConfig):
        decay = config.weight_decay
        return AdamW(parameters, betas=betas, eps=config.epsilon, weight_decay=decay, fused=True)
    return Adam(parameters, betas=betas, eps=config.epsilon, fused=True)
