"""Make the trainer and the optimizer that a recipe names: a new trainer is one line here.

All optimizers are torch's fused ones: one pass over the weights, 4 to 10 % of a small model's step.
A checkpoint says of itself whether its optimizer was fused, so older ones resume bitwise.
"""

from collections.abc import Callable, Iterable, Mapping

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import SGD, Adam, AdamW, Optimizer

from training.settings.trainers import (
    AdamwConfig,
    AdPsgdConfig,
    BmufConfig,
    D1dPsgdConfig,
    DPsgdConfig,
    GtcConfig,
    HtmConfig,
    OneBitConfig,
    OptimizerConfig,
    RandPsgdConfig,
    SgdConfig,
    SparseLocoConfig,
    SynchronousConfig,
    TrainerConfig,
)
from training.trainers.ad_psgd import AdPsgd
from training.trainers.bmuf import Bmuf, SparseLoco
from training.trainers.decentralized import D1dPsgd, DPsgd, RandPsgd
from training.trainers.gtc import Gtc
from training.trainers.htm import Htm
from training.trainers.one_bit import OneBit
from training.trainers.synchronous import Synchronous
from training.trainers.trainer import Trainer

TRAINER_OF: Mapping[type[TrainerConfig], Callable[..., Trainer]] = {
    SynchronousConfig: Synchronous,
    GtcConfig: Gtc,
    BmufConfig: Bmuf,
    HtmConfig: Htm,
    OneBitConfig: OneBit,
    SparseLocoConfig: SparseLoco,
    DPsgdConfig: DPsgd,
    AdPsgdConfig: AdPsgd,
    RandPsgdConfig: RandPsgd,
    D1dPsgdConfig: D1dPsgd,
}
"""Configurations are records of `training.settings`, which imports no torch."""


def make_trainer(
    config: TrainerConfig, model: nn.Module, optimizer: Optimizer, group: ProcessGroup
) -> Trainer:
    """Wrap model and optimizer; all ranks of `group` must call this together."""
    return TRAINER_OF[type(config)](model, optimizer, group=group, **config.arguments())


def make_optimizer(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Make the optimizer of a recipe; the training loop sets its learning rate."""
    if isinstance(config, SgdConfig):
        return SGD(parameters, momentum=config.momentum, fused=True)
    betas = config.beta1, config.beta2
    if isinstance(config, AdamwConfig):
        decay = config.weight_decay
        return AdamW(parameters, betas=betas, eps=config.epsilon, weight_decay=decay, fused=True)
    return Adam(parameters, betas=betas, eps=config.epsilon, fused=True)
