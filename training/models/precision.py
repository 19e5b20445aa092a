"""Choose in which numbers a model computes; its weights and their gradients remain float32.

torch's autocast would compute an LSTM in float16 on a GPU, whatever type it is given, and gradients
would then need a scaler: so bfloat16 is asked for layer by layer, the same on every device.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from jaxtyping import BFloat16, Float, Float32
from torch import Tensor, nn
from torch.nn import functional

from training.settings.model_training import Precision


@cache
def has_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 by itself, and so faster than float32.

    A GPU without it converts each number. torch's LSTM in bfloat16 took 14 times as long as in
    float32 on a CPU of AVX2 (tests/benchmarks/low_precision.py).
    """
    if device.type != "cuda":
        has_it = getattr(torch.cpu, "_is_avx512_bf16_supported", None)  # no part of torch's API
        return has_it is not None and bool(has_it())
    with torch.cuda.device(device):
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def training_precision(asked: Precision, device: torch.device) -> Precision:
    """Return the numbers in which a device trains: float32 where it has no bfloat16."""
    return "float32" if asked == "bfloat16" and not has_bfloat16(device) else asked


def fastest_precision(device: torch.device) -> Precision:
    """Return the numbers in which a device labels: bfloat16 on GPUs that have it."""
    return "bfloat16" if device.type == "cuda" and has_bfloat16(device) else "float32"


_SETTINGS: Mapping[str, tuple[Any, Any]] = {
    "fp32_precision": ("ieee", "tf32"),
    "allow_tf32": (False, True),
}
"""The values without and with TF32 of each switch's attribute."""


def set_float32_products(precision: Precision) -> None:
    """Let this process's products on GPUs use TF32, or not; by default LSTMs and filters do."""
    for switch, attribute in _switches():
        setattr(switch, attribute, _SETTINGS[attribute][precision == "tf32"])


@contextmanager
def without_tf32() -> Iterator[None]:
    """Compute products of float32 numbers in float32 within; then the switches are as before."""
    before = [(*each, getattr(*each)) for each in _switches()]
    set_float32_products("float32")
    try:
        yield
    finally:
        for switch, attribute, value in before:
            setattr(switch, attribute, value)


def _switches() -> list[tuple[Any, str]]:
    """Return torch's switches of matrices, LSTMs and convolutions, and their attribute's name."""
    matrices: Any = torch.backends.cuda.matmul
    cudnn: Any = torch.backends.cudnn
    if not hasattr(cudnn, "rnn"):  # before torch 2.9
        return [(matrices, "allow_tf32"), (cudnn, "allow_tf32")]
    return [(each, "fp32_precision") for each in (matrices, cudnn.rnn, cudnn.conv)]


def lstm_in_bfloat16(lstm: nn.LSTM) -> nn.LSTM:
    """Return an LSTM of rounded weights, whose gradients arrive at the weights of `lstm`."""
    rounded = copy.copy(lstm)
    # The copy's weights are no parameters: they live for one minibatch.
    rounded._parameters = {}
    rounded._flat_weights = list(_Rounding.apply(*lstm._flat_weights))  # type: ignore[no-untyped-call]
    for name, weight in zip(lstm._flat_weights_names, rounded._flat_weights, strict=True):
        object.__setattr__(rounded, name, weight)
    return rounded


def rounded_linear(
    linear: nn.Linear, inputs: Float[Tensor, "*batch inputs"]
) -> Float[Tensor, "*batch outputs"]:
    """Apply weights rounded to the numbers of the inputs; gradients arrive at those of `linear`."""
    dtype = inputs.dtype
    return functional.linear(inputs, linear.weight.to(dtype), linear.bias.to(dtype))


def summed_in_float32(
    linear: nn.Linear, inputs: BFloat16[Tensor, "*batch inputs"]
) -> Float32[Tensor, "*batch outputs"]:
    """Multiply as `rounded_linear` does, but keep the sums: outputs have 24 bits for 8.

    TF32 holds each factor exactly, so a GPU may use it.
    """
    return functional.linear(inputs.float(), linear.weight.bfloat16().float(), linear.bias)


class _Rounding(torch.autograd.Function):
    """_Rounding rounds weights where they lie: cuDNN copies none that lie in one piece."""

    @staticmethod
    def forward(ctx: object, *weights: Float32[Tensor, "..."]) -> tuple[Tensor, ...]:
        del ctx
        first = weights[0].untyped_storage()
        if any(each.untyped_storage().data_ptr() != first.data_ptr() for each in weights):
            return tuple(each.bfloat16() for each in weights)
        # flatten_parameters() laid them out for cuDNN, whose order is the same for both types.
        piece = weights[0].new_empty(0).set_(first).bfloat16()
        return tuple(
            piece.as_strided(each.shape, each.stride(), each.storage_offset()) for each in weights
        )

    @staticmethod
    def backward(ctx: object, *gradients: Float[Tensor, "..."]) -> tuple[Tensor, ...]:
        del ctx
        return tuple(each.float() for each in gradients)
