"""Count the parameters of a recipe's models; those of an LSTM without torch."""

from functools import cache

from infra.settings import ConfigurationError
from pipeline.filterbank import NUM_INPUTS
from training.settings.models import LstmConfig, ModelConfig


@cache
def num_parameters(config: ModelConfig, num_senones: int) -> int:
    """Count the parameters of a model, as torch does."""
    if isinstance(config, LstmConfig):
        units, directions = config.num_units, 2 if config.bidirectional else 1
        inputs = [NUM_INPUTS, *[units * directions] * (config.num_layers - 1)]
        # Four gates; torch keeps a bias for the inputs and one for the last outputs.
        layers = [directions * 4 * units * (width + units + 2) for width in inputs]
        return sum(layers) + (units * directions + 1) * num_senones
    import torch  # noqa: PLC0415 - an LSTM is counted without it

    from training.models.store import make_model  # noqa: PLC0415

    try:
        with torch.device("meta"):
            model = make_model(config, num_senones)
    except ConfigurationError:  # a factory that needs the numbers allocates them
        model = make_model(config, num_senones)
    return sum(parameter.numel() for parameter in model.parameters())
