"""Layers of which each rank holds some output units: linear ones, and LSTMs."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional

from training.distributed.process_group import ProcessGroup
from training.model_parallel.activations import Readers, gather_units, unit_bounds

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

    def forward(self, inputs: Float[Tensor, "... inputs"]) -> Float[Tensor, "... own_units"]:
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
        self, inputs: Float[Tensor, "batch frames inputs"]
    ) -> tuple[Float[Tensor, "batch frames units"], None]:
        """Return all units' outputs, from a state of zeros; None, as no state is carried."""
        hidden = inputs
        for layer in range(self.num_layers):
            hidden = self._layer(hidden, self._weights(layer))
            if layer < self.num_layers - 1:
                hidden = functional.dropout(hidden, self.dropout, self.training)
        return hidden, None

    def _weights(self, layer: int) -> Sequence[Tensor]:
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        return [self.get_parameter(f"{name}_l{layer}") for name in names]

    def _layer(
        self, inputs: Float[Tensor, "batch frames inputs"], weights: Sequence[Tensor]
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
