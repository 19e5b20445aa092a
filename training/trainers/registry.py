"""The trainer of each configuration that a recipe can name: a new one is one line here."""

from collections.abc import Callable, Mapping

from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from training.configuration.block_trainers import BmufConfig, HtmConfig, SparseLocoConfig
from training.configuration.trainers import (
    AdPsgdConfig,
    D1dPsgdConfig,
    DPsgdConfig,
    GtcConfig,
    OneBitConfig,
    RandPsgdConfig,
    SynchronousConfig,
    TrainerConfig,
)
from training.trainers.bmuf import Bmuf
from training.trainers.decentralized import AdPsgd, D1dPsgd, DPsgd, RandPsgd
from training.trainers.gtc import Gtc
from training.trainers.htm import Htm
from training.trainers.one_bit.one_bit import OneBit
from training.trainers.sparse_loco import SparseLoco
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
"""Configurations are records of `training.configuration`, which imports no torch."""


def make_trainer(
    config: TrainerConfig, model: nn.Module, optimizer: Optimizer, group: ProcessGroup
) -> Trainer:
    """Wrap model and optimizer; all ranks of `group` must call this together."""
    return TRAINER_OF[type(config)](model, optimizer, group=group, **config.arguments())
