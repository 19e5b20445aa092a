"""Count the parameters of a recipe's models; of its own architectures without torch."""

from functools import cache

from infra.settings import ConfigurationError
from pipeline.splicing import NUM_INPUTS
from training.settings.models import ConformerConfig, FactoryConfig, LstmConfig, ModelConfig


@cache
def num_parameters(config: ModelConfig, num_senones: int) -> int:
    """Count the parameters of a model, as torch does."""
    if isinstance(config, LstmConfig):
        return _of_lstm(config, num_senones)
    if isinstance(config, ConformerConfig):
        return _of_conformer(config, num_senones)
    return _of_own_model(config, num_senones)


def _linear(num_inputs: int, num_outputs: int) -> int:
    return (num_inputs + 1) * num_outputs


def _of_lstm(config: LstmConfig, num_senones: int) -> int:
    units, directions = config.num_units, 2 if config.bidirectional else 1
    inputs = [NUM_INPUTS, *[units * directions] * (config.num_layers - 1)]
    # Four gates; torch keeps a bias for the inputs and one for the last outputs.
    layers = [directions * 4 * units * (width + units + 2) for width in inputs]
    return sum(layers) + _linear(units * directions, num_senones)


def _of_conformer(config: ConformerConfig, num_senones: int) -> int:
    units, inner = config.num_units, config.feed_forward_factor * config.num_units
    norm = 2 * units
    feed_forward = norm + _linear(units, inner) + _linear(inner, units)
    distances = config.left_frames + 2 * config.chunk_frames - 1
    attention = _linear(units, 3 * units) + _linear(units, units) + config.num_heads * distances
    filters = units * (config.kernel_frames + 1)
    convolution = _linear(units, 2 * units) + filters + norm + _linear(units, units)
    block = 2 * feed_forward + attention + convolution + 3 * norm
    ends = _linear(NUM_INPUTS, units) + _linear(units, num_senones)
    return config.num_layers * block + ends


def _of_own_model(config: FactoryConfig, num_senones: int) -> int:
    """Make the model; a factory that needs numbers for it allocates them."""
    import torch  # noqa: PLC0415 - only a model of the user's own needs it

    from training.models.store import make_model  # noqa: PLC0415

    try:
        with torch.device("meta"):
            model = make_model(config, num_senones)
    except ConfigurationError:
        model = make_model(config, num_senones)
    return sum(parameter.numel() for parameter in model.parameters())
