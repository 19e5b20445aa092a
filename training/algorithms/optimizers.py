"""Make the optimizers that a recipe can name, which apply the gradients that a trainer gives them.

All are torch's fused ones: one pass over the weights, 4 to 10 % of a small model's step. A
checkpoint says of itself whether its optimizer was fused, so older ones resume bitwise.
"""

from collections.abc import Iterable

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from training.configuration.optimizers import AdamwConfig, OptimizerConfig, SgdConfig


def make_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make the optimizer of a recipe; the training loop sets its learning rate."""
    if isinstance(config, SgdConfig):
        return SGD(parameters, momentum=config.momentum, fused=True)
    betas = config.beta1, config.beta2
    if isinstance(config, AdamwConfig):
        decay = config.weight_decay
        return AdamW(parameters, betas=betas, eps=config.epsilon, weight_decay=decay, fused=True)
    return Adam(parameters, betas=betas, eps=config.epsilon, fused=True)
