"""Nested state of tensors and plain values to bytes and back, by training.array_encoding."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.array_encoding import Kinds, decode_arrays, encode_arrays

TENSOR, BFLOAT16 = "tensor", "bfloat16"
_KINDS: Kinds = {
    TENSOR: torch.from_numpy,
    BFLOAT16: lambda array: torch.from_numpy(array).view(torch.bfloat16),
}


def encode_state(state: object) -> bytes:
    """Encode dictionaries, lists, tuples, tensors, numbers, text, booleans and None."""
    return encode_arrays(state, _tensor_kind)


def decode_state(data: bytes) -> Any:  # noqa: ANN401
    """Invert `encode_state`; raise ValueError if the bytes are not such a state."""
    return decode_arrays(data, _KINDS)


def _tensor_kind(value: object) -> tuple[str, np.ndarray] | None:
    if not isinstance(value, Tensor):
        return None
    plain = value.detach().cpu()
    # NumPy has no bfloat16: its bits are stored.
    is_bfloat16 = plain.dtype == torch.bfloat16
    return (BFLOAT16, plain.view(torch.int16).numpy()) if is_bfloat16 else (TENSOR, plain.numpy())
