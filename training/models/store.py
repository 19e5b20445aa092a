"""Make models, store trained ones and load them.

A stored model has weights, frozen normalization, settings and senone priors. A new architecture is
one line in `make_model`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from infra.settings import ConfigurationError, plain, printable
from infra.store.object_store import ObjectStore
from pipeline.filterbank import NUM_INPUTS
from pipeline.records import Tally
from pipeline.runs.engine import StepRun
from pipeline.runs.manifest import Manifest, read_manifest, read_output
from pipeline.runs.names import model_step
from training.entry_point import EntryPoint
from training.models.acoustic_model import AcousticModel, NetworkModel
from training.models.conformer import Conformer
from training.models.feed_forward import FeedForward
from training.models.lstm import LstmModel, ProjectedBlstm
from training.models.precision import set_float32_products
from training.settings.models import (
    GIVEN_TO_MODELS,
    ConformerConfig,
    FeedForwardConfig,
    LstmConfig,
    ModelConfig,
    ProjectedBlstmConfig,
)
from training.tensor_encoding import decode_state, encode_state


def make_model(config: ModelConfig, num_senones: int) -> AcousticModel:
    """Make a recipe's model with random weights.

    ConfigurationError if a factory cannot be imported, does not take the settings, or fails.
    """
    if isinstance(config, LstmConfig):
        return LstmModel(config, num_senones)
    if isinstance(config, ConformerConfig):
        return NetworkModel(config, num_senones, Conformer(config, num_senones))
    if isinstance(config, FeedForwardConfig):
        return NetworkModel(config, num_senones, FeedForward(config, num_senones))
    if isinstance(config, ProjectedBlstmConfig):
        return NetworkModel(config, num_senones, ProjectedBlstm(config, num_senones))
    entry_point = EntryPoint(config.factory, config.settings, GIVEN_TO_MODELS)
    network = entry_point.call(num_inputs=NUM_INPUTS, num_senones=num_senones)
    if not isinstance(network, nn.Module):
        raise entry_point.error(f"returns a {type(network).__name__}: need a torch.nn.Module")
    return NetworkModel(config, num_senones, network)


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """TrainedModel: an acoustic model with the log priors of its senones, for decoding."""

    model: AcousticModel
    log_priors: Float[Tensor, " senones"]

    def to(self, device: torch.device) -> "TrainedModel":
        """Move the model to `device`; the priors stay with the decoder, on the CPU.

        What is stored comes from float32: this process's products use no TF32 from now on.
        """
        set_float32_products("float32")
        return replace(self, model=self.model.to(device))


def encode_model(trained: TrainedModel) -> bytes:
    """Encode all that is needed to use the model."""
    state = {
        "config": plain(trained.model.config),
        "num_senones": trained.model.num_senones,
        "log_priors": trained.log_priors,
        "state": dict(trained.model.state_dict()),
    }
    return encode_state(state)


def decode_model(data: bytes, config: ModelConfig) -> TrainedModel:
    """Decode what `encode_model` wrote to a model that is ready for inference.

    The recipe's `config` makes the model: what is stored names no module to import, it is compared
    alone. ConfigurationError if it was another model.
    """
    state = _require_parts(decode_state(data))
    if state["config"] != plain(config):
        raise ConfigurationError(
            f"was trained as {printable(str(state['config']), 500)}, and the recipe has "
            f"{plain(config)}: take the recipe that it was trained with, or train again"
        )
    model = make_model(config, state["num_senones"])
    try:
        model.load_state_dict(state["state"])
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{printable(str(error), 500)}: its code now makes another model: take the code that "
            "it was trained with, or train again"
        ) from error
    return TrainedModel(model.eval(), state["log_priors"])


def _require_parts(state: object) -> dict[str, Any]:
    """Refuse a state that is no model's, before senones that it only claims take memory."""
    parts: dict[str, Any] = state if isinstance(state, dict) else {}
    priors: Any
    priors, count = parts.get("log_priors"), parts.get("num_senones")
    is_vector = isinstance(priors, Tensor) and priors.dtype == torch.float32 and priors.ndim == 1
    if not is_vector or type(count) is not int or priors.shape != (count,):
        raise ValueError("no model with one prior for each senone: train it again in a new --run")
    if not isinstance(parts.get("state"), dict) or "config" not in parts:
        raise ValueError("a model without weights or its form: train it again in a new --run")
    return parts


def load_model(store: ObjectStore, run_uri: str, name: str, config: ModelConfig) -> TrainedModel:
    """Load model `name` of a run, such as the student, which is `config` in the recipe.

    ConfigurationError if the model that is stored is another one.
    """
    (output,) = read_manifest(store, run_uri, model_step(name)).outputs
    try:
        return decode_model(read_output(store, run_uri, output), config)
    except ConfigurationError as error:
        raise ConfigurationError(f"{model_step(name)}: {error}") from error


def store_model(
    step: StepRun,
    trained: TrainedModel,
    data: Tally,
    statistics: Mapping[str, Any],
    left_out: Tally,
) -> Manifest:
    """Store a model; return the manifest of the step that trained it on `data`, not `left_out`."""
    output = step.context.put_output("model", ".npz", encode_model(trained), data)
    return step.manifest(
        outputs=(output,),
        tally_in=data + left_out,
        tally_out=data,
        unselected=left_out,
        statistics=statistics,
    )


def log_priors(counts: list[int]) -> Float[Tensor, " senones"]:
    """Return log relative frequencies of the senones in the alignments, each counted once more."""
    # Add-one smoothing: decoding subtracts log priors, which must be finite for unseen senones.
    smoothed = torch.tensor(counts, dtype=torch.float64) + 1
    return (smoothed / smoothed.sum()).log().float()
