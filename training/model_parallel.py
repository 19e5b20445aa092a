"""Divide a model's output units among a few ranks (model parallelism; 004 4 c, 5.5).

Layers exchange activations, and their gradients. A data-parallel trainer joins the ranks that hold
the same units. `merged_state` puts the parts of a model together again.
"""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional

from training.distributed import collectives
from training.distributed.collectives import all_to_all
from training.distributed.process_group import ProcessGroup, subgroup_of, world_ranks
from training.models.acoustic_model import AcousticModel
from training.models.lstm import LstmModel

Readers = Literal["own units", "all units"]
"""What a rank computes from the gathered activations: its own units of the next layer, or all."""


def unit_bounds(num_units: int, num_ranks: int) -> list[int]:
    """Return where each rank's units begin, and the end; their numbers differ by one at most."""
    if num_units < num_ranks:
        raise ValueError(f"a layer of {num_units} units on {num_ranks} ranks: need one for each")
    return [rank * num_units // num_ranks for rank in range(num_ranks + 1)]


def gather_units(
    own: Float[Tensor, "... own_units"], num_units: int, group: ProcessGroup, readers: Readers
) -> Float[Tensor, "... units"]:
    """Return the activations of all ranks' units, the same bits on all ranks.

    Where ranks read them for their "own units", each rank's gradient is a part of the whole, and
    the parts are summed in rank order. Where each computes "all units", each has the whole.
    """
    gathered: Tensor = _Gather.apply(own, num_units, group, readers)  # type: ignore[no-untyped-call]
    return gathered


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        own: Float[Tensor, "... own_units"],
        num_units: int,
        group: ProcessGroup,
        readers: Readers,
    ) -> Float[Tensor, "... units"]:
        bounds = unit_bounds(num_units, group.size())
        ctx.bounds, ctx.group, ctx.readers = bounds, group, readers  # type: ignore[attr-defined]
        rows = own.numel() // own.shape[-1]
        sizes = [rows * (end - first) for first, end in pairwise(bounds)]
        parts = [own.reshape(-1)] * group.size()
        received = all_to_all(parts, sizes, group, "activations")
        return torch.cat([part.view(*own.shape[:-1], -1) for part in received], dim=-1)

    @staticmethod
    def backward(
        ctx: FunctionCtx, gradient: Float[Tensor, "... units"]
    ) -> tuple[Tensor, None, None, None]:
        bounds: list[int] = ctx.bounds  # type: ignore[attr-defined]
        group: ProcessGroup = ctx.group  # type: ignore[attr-defined]
        slices = [gradient[..., first:end] for first, end in pairwise(bounds)]
        own = slices[group.rank()]
        if ctx.readers == "own units":  # type: ignore[attr-defined]
            parts = [each.reshape(-1) for each in slices]
            sizes = [own.numel()] * group.size()
            received = all_to_all(parts, sizes, group, "gradients of activations")
            own = torch.stack(received).sum(0).view(own.shape)
        return own, None, None, None


NUM_GATES = 4


def rows_of_units(
    num_units: int, num_stacked: int, group: ProcessGroup
) -> list[Int64[Tensor, " _"]]:
    """Return each rank's rows of a weight, which stacks matrices of all units: an LSTM's gates."""
    bounds = unit_bounds(num_units, group.size())
    return [
        torch.cat([torch.arange(first, end) + gate * num_units for gate in range(num_stacked)])
        for first, end in pairwise(bounds)
    ]


class SplitLinear(nn.Module):
    """SplitLinear computes a rank's output units of a linear layer, from all inputs.

    If `gathers`, its inputs are the rank's own units of the layer before.
    """

    def __init__(self, whole: nn.Linear, group: ProcessGroup, *, gathers: bool) -> None:
        super().__init__()
        self.group, self.num_inputs, self.gathers = group, whole.in_features, gathers
        self.rows = rows_of_units(whole.out_features, 1, group)
        own = self.rows[group.rank()]
        self.weight = nn.Parameter(whole.weight.detach()[own])
        self.bias = None if whole.bias is None else nn.Parameter(whole.bias.detach()[own])

    def forward(self, inputs: Float[Tensor, "... dim"]) -> Float[Tensor, "... own_units"]:
        """Return the rank's own units."""
        if self.gathers:
            inputs = gather_units(inputs, self.num_inputs, self.group, "own units")
        return functional.linear(inputs, self.weight, self.bias)


class GatheredUnits(nn.Module):
    """GatheredUnits returns the units of all ranks, from which each computes the same loss."""

    def __init__(self, num_units: int, group: ProcessGroup) -> None:
        super().__init__()
        self.num_units, self.group = num_units, group

    def forward(self, own: Float[Tensor, "... own_units"]) -> Float[Tensor, "... units"]:
        """Gather the last layer's units."""
        readers: Readers = "all units"
        return gather_units(own, self.num_units, self.group, readers)


class SplitLstm(nn.Module):
    """SplitLstm computes a rank's own units of each layer, and gathers them after each frame.

    The recurrence needs all units of the frame before: one exchange a frame and layer. Its outputs
    are all units, of which the next layer must compute its own units alone.
    """

    def __init__(self, whole: nn.LSTM, group: ProcessGroup) -> None:
        super().__init__()
        if whole.bidirectional or whole.proj_size or not (whole.bias and whole.batch_first):
            raise ValueError(
                "a split LSTM of another form: need batch_first and bias, one direction, and no "
                "projection, as the student's"
            )
        self.group, self.num_units, self.num_layers = group, whole.hidden_size, whole.num_layers
        self.dropout = whole.dropout
        self.rows = rows_of_units(whole.hidden_size, NUM_GATES, group)
        for name, parameter in whole.named_parameters():
            self.register_parameter(name, nn.Parameter(parameter.detach()[self.rows[group.rank()]]))

    def forward(
        self, inputs: Float[Tensor, "batch frames dim"]
    ) -> tuple[Float[Tensor, "batch frames units"], None]:
        """Return all units' outputs, from a state of zeros; None, as no state is carried."""
        hidden = inputs
        for layer in range(self.num_layers):
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            weights = [self.get_parameter(f"{name}_l{layer}") for name in names]
            hidden = self._layer(hidden, weights)
            if layer < self.num_layers - 1:
                hidden = functional.dropout(hidden, self.dropout, self.training)
        return hidden, None

    def _layer(
        self, inputs: Float[Tensor, "batch frames dim"], weights: Sequence[Tensor]
    ) -> Float[Tensor, "batch frames units"]:
        weight_ih, weight_hh, bias_ih, bias_hh = weights
        projected = functional.linear(inputs, weight_ih, bias_ih + bias_hh)
        units = inputs.new_zeros(len(inputs), self.num_units)
        cell = inputs.new_zeros(len(inputs), len(weight_hh) // NUM_GATES)
        outputs = []
        for frame in projected.unbind(1):
            gates = torch.addmm(frame, units, weight_hh.T)
            enter, forget, new, leave = gates.chunk(NUM_GATES, dim=1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            own = leave.sigmoid() * cell.tanh()
            units = gather_units(own, self.num_units, self.group, "own units")
            outputs.append(units)
        return torch.stack(outputs, dim=1)


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
        self, normalized: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch frames senones"]:
        """Return logits, `look_ahead` frames late; only backwards in time lengths would matter."""
        del lengths
        hidden, _ = self.lstm(normalized)
        logits: Tensor = self.gathered(self.output(hidden))
        return logits

    def bfloat16_logits(
        self, normalized: Float[Tensor, "batch frames dim"], lengths: Int64[Tensor, " batch"]
    ) -> Float[Tensor, "batch frames senones"]:
        """Raise ValueError."""
        del normalized, lengths
        raise ValueError("precision = 'bfloat16': a split student needs 'float32'")

    def whole_norm(self, norm: Float[Tensor, ""]) -> Float[Tensor, ""]:
        """Return the norm over all parts, so that each is clipped by the same factor."""
        squares = norm.square()
        collectives.all_reduce_sum(squares, self.gathered.group)
        return squares.sqrt()


def split_model(model: nn.Module, group: ProcessGroup) -> nn.Module:
    """Return this rank's part of a model that all ranks of `group` hold: a copy of its own units.

    The model is a feed-forward network, an `nn.Sequential` of linear and component-wise layers, or
    an LSTM student. The part's outputs are those of all units, so the same loss is computed on
    each rank. Ranks must be given the same minibatches. Dropout between an LSTM's layers must
    draw the same numbers on all ranks of the group: seed them alike. ValueError for other models.
    """
    if isinstance(model, LstmModel) and isinstance(model.filters, nn.Identity):
        return SplitStudent(model, group)
    if isinstance(model, nn.Sequential):
        return _split_layers(model, group)
    raise ValueError(
        f"model parallelism of a {type(model).__name__}: need an nn.Sequential of linear and "
        "component-wise layers, or an LSTM model without filters"
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
    received = all_to_all(parts, sizes, group, "parameters")
    whole = own.new_empty(sum(map(len, layer.rows)), *own.shape[1:])
    for rows, values in zip(layer.rows, received, strict=True):
        whole[rows] = values.view(len(rows), *own.shape[1:])
    return whole


@dataclass(frozen=True, slots=True)
class ParallelRanks:
    """ParallelRanks: `model` divides the units; `data` trains this rank's with a trainer.

    Paper 004 writes K x M: K data-parallel nodes of M GPUs each. Ranks of a node follow each other.
    """

    model: ProcessGroup
    data: ProcessGroup

    @classmethod
    def of(cls, world: ProcessGroup, num_parts: int) -> "ParallelRanks":
        """Divide the world's ranks; all must call this together, before other groups are made.

        ValueError where the number of ranks is no multiple of `num_parts`.
        """
        if num_parts < 1 or world.size() % num_parts:
            raise ValueError(
                f"num_parts = {num_parts}: need a divisor of {world.size()}, the number of ranks"
            )
        ranks, device = world_ranks(world), torch.device("cpu")
        nodes = [ranks[first : first + num_parts] for first in range(0, len(ranks), num_parts)]
        peers = [ranks[part::num_parts] for part in range(num_parts)]
        models = [subgroup_of(world, node, device) for node in nodes]
        datas = [subgroup_of(world, same, device) for same in peers]
        model = models[world.rank() // num_parts]
        data = datas[world.rank() % num_parts]
        assert model is not None
        assert data is not None
        return cls(model, data)
