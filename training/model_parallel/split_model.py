"""Split a model among ranks, and merge its parameters again."""

from copy import deepcopy

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from training.distributed import collectives
from training.distributed.pending_exchanges import start_all_to_all
from training.distributed.process_group import ProcessGroup
from training.model_parallel.split_layers import GatheredUnits, SplitLinear, SplitLstm
from training.models.acoustic_model import AcousticModel
from training.models.lstm import LstmModel

COMPONENT_WISE = (nn.Sigmoid, nn.Tanh, nn.ReLU, nn.GELU, nn.SiLU, nn.Identity)
"""Layers that compute each unit from itself alone, and so run on a rank's own units."""


class SplitStudent(AcousticModel):
    """SplitStudent holds a rank's units of an LSTM student's layers, and of its output layer.

    It is for training in float32: merge its parameters to label utterances, or pieces of them.
    """

    def __init__(self, whole: LstmModel, group: ProcessGroup) -> None:
        super().__init__(whole.config, whole.num_senones)
        self.mean.copy_(whole.mean)
        self.inverse_deviation.copy_(whole.inverse_deviation)
        self.lstm = SplitLstm(whole.lstm, group)
        self.output = SplitLinear(whole.output, group, gathers=False)
        self.gathered = GatheredUnits(whole.num_senones, group)

    def normalized_logits(
        self, normalized: Float[Tensor, "batch frames 192"], lengths: Int64[Tensor, " batch"] | None
    ) -> Float[Tensor, "batch frames senones"]:
        """Return logits, `look_ahead` frames late; only backwards in time lengths would matter."""
        del lengths
        hidden, _ = self.lstm(normalized)
        logits: Tensor = self.gathered(self.output(hidden))
        return logits

    def bfloat16_logits(
        self, normalized: Float[Tensor, "batch frames 192"], lengths: Int64[Tensor, " batch"] | None
    ) -> Float[Tensor, "batch frames senones"]:
        """Raise ValueError."""
        del normalized, lengths
        raise ValueError("precision = 'bfloat16': a split student needs 'float32'")

    def whole_norm(self, norm: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Return the norm over all parts, so that each is clipped by the same factor."""
        squares = norm.square()
        collectives.all_reduce_sum(squares, self.gathered.group)
        return squares.sqrt()

    @property
    def carries_state(self) -> bool:
        """Return False: it takes whole sequences."""
        return False

    def advance(
        self, normalized: Float[Tensor, "frames 192"], state: object, is_last: bool
    ) -> tuple[Float[Tensor, "outputs senones"], object]:
        """Raise ValueError."""
        del normalized, state, is_last
        raise ValueError("a split student takes no pieces of utterances: merge it first")


def split_model(model: nn.Module, group: ProcessGroup) -> nn.Module:
    """Return this rank's part of a model that all ranks of `group` hold: a copy of its own units.

    The model is a feed-forward network, an `nn.Sequential` of linear and component-wise layers, or
    an LSTM student. The part's outputs are those of all units, so the same loss is computed on
    each rank. Ranks must be given the same minibatches. Dropout between an LSTM's layers must
    draw the same numbers on all ranks of the group: seed them alike. ValueError for other models.
    """
    if isinstance(model, LstmModel):
        return SplitStudent(model, group)
    if isinstance(model, nn.Sequential):
        return _split_layers(model, group)
    raise ValueError(
        f"model parallelism of a {type(model).__name__}: need an nn.Sequential of linear and "
        "component-wise layers, or an LSTM model"
    )


def _split_layers(model: nn.Sequential, group: ProcessGroup) -> nn.Sequential:
    layers: list[nn.Module] = []
    num_units = 0
    for layer in model:
        if isinstance(layer, nn.Linear):
            layers.append(SplitLinear(layer, group, gathers=num_units > 0))
            num_units = layer.out_features
        elif isinstance(layer, COMPONENT_WISE) and num_units > 0:
            layers.append(deepcopy(layer))
        else:
            names = ", ".join(each.__name__ for each in COMPONENT_WISE)
            raise ValueError(
                f"layer {len(layers)}, {type(layer).__name__}: need a linear layer first, then "
                f"linear ones and {names}"
            )
    return nn.Sequential(*layers, GatheredUnits(num_units, group))


@torch.no_grad()
def merged_state(part: nn.Module, group: ProcessGroup) -> dict[str, Tensor]:
    """Return the whole model's state, the same on all ranks, which must call this together.

    Its names are those of the model that was split.
    """
    state = dict(part.state_dict())
    for prefix, layer in part.named_modules():
        if isinstance(layer, SplitLinear | SplitLstm):
            for name, own in layer.named_parameters(prefix):
                state[name] = _merged(own, layer, group)
    return state


def _merged(own: Tensor, layer: SplitLinear | SplitLstm, group: ProcessGroup) -> Tensor:
    """Return all rows of a parameter, from each rank's own."""
    width = own[0].numel()
    sizes = [width * len(rows) for rows in layer.rows]
    parts = [own.reshape(-1)] * group.size()
    received = start_all_to_all(parts, sizes, group, "parameters").wait()
    whole = own.new_empty(sum(map(len, layer.rows)), *own.shape[1:])
    for rows, values in zip(layer.rows, received, strict=True):
        whole[rows] = values.view(len(rows), *own.shape[1:])
    return whole
