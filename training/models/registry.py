"""The architectures that a recipe can name: a new one is one line here."""

import json
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import torch

from infra.configuration import ConfigurationError, read_record
from training.models.conformer import ConformerConfig
from training.models.factory import FactoryConfig
from training.models.lstm import LstmConfig

ModelConfig: TypeAlias = LstmConfig | ConformerConfig | FactoryConfig
"""The settings of each architecture; a recipe's `name` chooses, and without one it is an LSTM."""


@dataclass(frozen=True, slots=True)
class _Form:
    form: ModelConfig


def read_form(text: str) -> ModelConfig:
    """Read a model's settings that another process wrote as JSON; ConfigurationError if none."""
    return read_record(_Form, {"form": json.loads(text)}, "model").form


@cache
def num_parameters(config: ModelConfig, num_senones: int) -> int:
    """Count the parameters of a model; a factory that needs numbers for it allocates them."""
    try:
        with torch.device("meta"):
            model = config.make_model(num_senones)
    except ConfigurationError:
        model = config.make_model(num_senones)
    return sum(parameter.numel() for parameter in model.parameters())
