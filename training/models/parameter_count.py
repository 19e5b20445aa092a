"""Count the parameters of a recipe's models; those of the papers' networks without torch."""

from functools import cache
from itertools import pairwise

from infra.settings import ConfigurationError
from pipeline.filterbank import NUM_INPUTS, STACK
from training.settings.models import (
    FIRST_BINS,
    NUM_SECOND_PLACES,
    SECOND_PLACES,
    FeedForwardConfig,
    LstmConfig,
    ModelConfig,
    ProjectedBlstmConfig,
)


@cache
def num_parameters(config: ModelConfig, num_senones: int) -> int:
    """Count the parameters of a model, as torch does."""
    if isinstance(config, LstmConfig | ProjectedBlstmConfig):
        units, directions = config.num_units, 2 if config.bidirectional else 1
        filters = config.num_filters if isinstance(config, LstmConfig) else 0
        inputs = [units if filters else NUM_INPUTS, *[units * directions] * (config.num_layers - 1)]
        # Four gates; torch keeps a bias for the inputs and one for the last outputs.
        layers = sum(directions * 4 * units * (width + units + 2) for width in inputs)
        if filters:
            layers += (STACK * FIRST_BINS + 1 + SECOND_PLACES * filters + 1) * filters
            layers += (NUM_SECOND_PLACES * filters + 1) * units
        if isinstance(config, LstmConfig):
            return layers + (units * directions + 1) * num_senones
        projected = config.num_projected_units
        return layers + (units * directions + 1) * projected + (projected + 1) * num_senones
    if isinstance(config, FeedForwardConfig):
        window = (config.left_frames + 1 + config.look_ahead) * NUM_INPUTS
        widths = [window, *[config.num_units] * config.num_layers, num_senones]
        return sum((width + 1) * then for width, then in pairwise(widths))
    import torch  # noqa: PLC0415 - an LSTM is counted without it

    from training.models.store import make_model  # noqa: PLC0415

    try:
        with torch.device("meta"):
            model = make_model(config, num_senones)
    except ConfigurationError:  # a factory that needs the numbers allocates them
        model = make_model(config, num_senones)
    return sum(parameter.numel() for parameter in model.parameters())
