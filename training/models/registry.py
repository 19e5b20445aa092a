"""Make the model of each architecture that a recipe can name: a new one is one line here."""

from torch import nn

from pipeline.splicing import NUM_INPUTS
from training.configuration.models import (
    GIVEN_TO_MODELS,
    ConformerConfig,
    FactoryConfig,
    LstmConfig,
    ModelConfig,
)
from training.entry_point import EntryPoint
from training.models.acoustic_model import AcousticModel, NetworkModel
from training.models.conformer import Conformer
from training.models.lstm import LstmModel


def make_model(config: ModelConfig, num_senones: int) -> AcousticModel:
    """Make a recipe's model with random weights.

    ConfigurationError if a factory cannot be imported, does not take the settings, or fails.
    """
    if isinstance(config, LstmConfig):
        return LstmModel(config, num_senones)
    if isinstance(config, ConformerConfig):
        return NetworkModel(config, num_senones, Conformer(config, num_senones))
    return NetworkModel(config, num_senones, _own_network(config, num_senones))


def _own_network(config: FactoryConfig, num_senones: int) -> nn.Module:
    """Import the factory and let it make the module."""
    entry_point = EntryPoint(config.factory, config.settings, GIVEN_TO_MODELS)
    network = entry_point.call(num_inputs=NUM_INPUTS, num_senones=num_senones)
    if not isinstance(network, nn.Module):
        raise entry_point.error(f"returns a {type(network).__name__}: need a torch.nn.Module")
    return network
