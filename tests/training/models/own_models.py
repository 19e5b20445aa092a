"""Factories as users write them: one that is right, and one for each way to be wrong."""

import os
from typing import Annotated

import torch
from torch import Tensor, nn

from infra.settings import Range
from pipeline.filterbank import NUM_INPUTS


class Tdnn(nn.Module):
    """Tdnn sees `context` frames to either side, and masks padding."""

    def __init__(self, num_inputs: int, num_senones: int, num_units: int, context: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(num_inputs, num_units, 2 * context + 1, padding=context)
        self.output = nn.Linear(num_units, num_senones)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        steps = torch.arange(frames.shape[1])
        present = (steps < lengths.view(-1, 1)).unsqueeze(-1).to(frames.device)
        hidden = self.convolution(frames.masked_fill(~present, 0.0).mT).mT
        return self.output(hidden.relu())


def tdnn(
    num_inputs: int,
    num_senones: int,
    num_units: Annotated[int, Range(1, 512)] = 16,
    context: int = 2,
    scale: float = 1.0,
    kind: str = "relu",
) -> Tdnn:
    assert (type(scale), kind) == (float, "relu")
    return Tdnn(num_inputs, num_senones, num_units, context)


def untyped(num_inputs, num_senones, num_units=16, **others) -> Tdnn:
    assert others in ({}, {"anything": True})
    return Tdnn(num_inputs, num_senones, num_units, 0)


class Linear(nn.Module):
    """Linear is a layer; the others below change one thing of it."""

    def __init__(self, num_inputs: int, num_senones: int) -> None:
        super().__init__()
        self.output = nn.Linear(num_inputs, num_senones)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        del lengths
        return self.output(frames)


class DependsOnPadding(Linear):
    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(frames - frames.mean(1, keepdim=True), lengths)


class Random(Linear):
    def __init__(self, num_inputs: int, num_senones: int) -> None:
        super().__init__(num_inputs, num_senones)
        with torch.no_grad():
            self.output.bias.copy_(torch.tensor([float(each) for each in os.urandom(num_senones)]))


class RandomStep(Linear):
    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        noise = int.from_bytes(os.urandom(3), "big") if self.training else 0
        return super().forward(frames * (1 + noise), lengths)


class Short(Linear):
    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(frames, lengths)[:, ::2]


class Double(Linear):
    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(frames, lengths).double()


class Infinite(Linear):
    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(frames, lengths) / 0


class Rotated(Linear):
    """Rotated keeps constants in a buffer that is stored, of the kind that is given."""

    def __init__(self, num_inputs: int, num_senones: int, kind: str) -> None:
        super().__init__(num_inputs, num_senones)
        self.register_buffer("turns", torch.ones(3).to(getattr(torch, kind)))


class Frozen(Linear):
    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(frames, lengths).detach()


class Failing(Linear):
    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        del frames, lengths
        raise KeyError("a\nmistake")


class Float32Alone(Linear):
    """Float32Alone multiplies by a constant that is not rounded as its parameters are."""

    def __init__(self, num_inputs: int, num_senones: int) -> None:
        super().__init__(num_inputs, num_senones)
        self.weights = torch.eye(num_inputs)

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(frames @ self.weights, lengths)


class Forgetful(Linear):
    def advance(self, frames: Tensor, state: object, is_last: bool) -> tuple[Tensor, object]:
        return self.output(frames) * (1.0 if state is None else 2.0), is_last


class FarAhead(Linear):
    """FarAhead sees its own frame and the 45th after it, none between."""

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        hidden = super().forward(frames, lengths)
        return hidden + nn.functional.pad(hidden, (0, 0, 0, 45))[:, 45:]


class TwoFramesLate(Linear):
    """TwoFramesLate gives logits of the frame before the last one, and streams."""

    def forward(self, frames: Tensor, lengths: Tensor) -> Tensor:
        hidden = super().forward(frames, lengths)
        return hidden + nn.functional.pad(hidden, (0, 0, 2, 0))[:, : hidden.shape[1]]

    def advance(self, frames: Tensor, state: object, is_last: bool) -> tuple[Tensor, object]:
        del is_last
        before = (
            state if isinstance(state, Tensor) else frames.new_zeros(2, self.output.out_features)
        )
        known = torch.cat([before, self.output(frames)])
        return known[2:] + known[:-2], known[-2:]


def no_module(num_inputs: int, num_senones: int) -> str:
    return f"{num_inputs} to {num_senones}"


def deaf(num_senones: int) -> nn.Module:
    return Linear(NUM_INPUTS, num_senones)
