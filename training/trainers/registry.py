"""The trainers that a recipe can name (003 VI, 000 2, 004): a new one is one line here."""

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeAlias, get_args

from infra.configuration import TAG
from training.algorithms.optimizers import OptimizerConfig, SgdConfig
from training.trainers.bmuf import BmufConfig
from training.trainers.decentralized import (
    AdPsgdConfig,
    D1dPsgdConfig,
    DPsgdConfig,
    RandPsgdConfig,
)
from training.trainers.gtc import GtcConfig
from training.trainers.htm import HtmConfig
from training.trainers.one_bit.one_bit import OneBitConfig
from training.trainers.sparse_loco import SparseLocoConfig
from training.trainers.synchronous import SynchronousConfig

TrainerConfig: TypeAlias = (
    SynchronousConfig
    | GtcConfig
    | BmufConfig
    | HtmConfig
    | OneBitConfig
    | SparseLocoConfig
    | DPsgdConfig
    | AdPsgdConfig
    | RandPsgdConfig
    | D1dPsgdConfig
)

TRAINERS: Mapping[str, type[TrainerConfig]] = {
    config().name: config for config in get_args(TrainerConfig)
}
"""The configuration of each trainer, by the name that recipes give it."""


def check_optimizer(trainer: TrainerConfig, optimizer: OptimizerConfig) -> None:
    """Raise ValueError where a recipe gives a trainer an optimizer that it cannot work with."""
    if isinstance(trainer, OneBitConfig) and optimizer != SgdConfig(momentum=0.0):
        raise ValueError(
            f"optimizer = {optimizer}: the trainer one_bit has momentum and AdaGrad itself: need "
            'optimizer = { name = "sgd", momentum = 0 }, and trainer.momentum for the momentum'
        )


def describe_trainers() -> str:
    """Say in a sentence each what the trainers do, for a job's help."""
    summaries = ((inspect.getdoc(config) or "").splitlines()[0] for config in TRAINERS.values())
    return " ".join(summaries)


def with_trainer(table: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Name another trainer in a recipe's table, without the settings that only others have.

    A key that no trainer has stays, to be refused with the recipe.
    """
    settings = {
        trainer: {field.name for field in fields(TRAINERS[trainer])} for trainer in TRAINERS
    }
    surplus = set().union(*settings.values()) - settings[name]
    return {key: value for key, value in table.items() if key not in surplus} | {TAG: name}


def put_trainer(section: dict[str, Any], name: str) -> None:
    """Name another trainer in a recipe's section; 1-bit SGD brings the optimizer that it needs."""
    section["trainer"] = with_trainer(section.get("trainer", {}), name)
    if TRAINERS[name] is OneBitConfig:
        section["optimizer"] = {TAG: SgdConfig().name, "momentum": 0.0}
