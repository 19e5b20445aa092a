"""Nested state of tensors and plain values to bytes and back, without pickle.

An npz of the tensors, in order, and a JSON structure that refers to them by number.
"""

import io
import json
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from torch import Tensor

STRUCTURE = "structure"


def encode_state(state: object) -> bytes:
    """Encode dictionaries, lists, tuples, tensors, numbers, text, booleans and None."""
    tensors: list[Tensor] = []
    structure = _encode(state, tensors)
    arrays = {str(index): tensor.detach().cpu().numpy() for index, tensor in enumerate(tensors)}
    text = np.frombuffer(json.dumps(structure).encode(), np.uint8)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **{STRUCTURE: text}, **arrays)
    return buffer.getvalue()


def decode_state(data: bytes) -> Any:  # noqa: ANN401
    """Invert `encode_state`; raise ValueError if the bytes are not such a state."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            structure = json.loads(archive[STRUCTURE].tobytes())
            tensors = [torch.from_numpy(archive[str(n)]) for n in range(len(archive.files) - 1)]
    except (OSError, KeyError, ValueError, BadZipFile) as error:
        raise ValueError(f"{len(data)} bytes are no state of megahour: {error}") from error
    return _decode(structure, tensors)


def _encode(value: object, tensors: list[Tensor]) -> object:
    if isinstance(value, Tensor):
        # NumPy has no bfloat16: its bits are stored.
        is_bfloat16 = value.dtype == torch.bfloat16
        tensors.append(value.view(torch.int16) if is_bfloat16 else value)
        return {"bfloat16" if is_bfloat16 else "tensor": len(tensors) - 1}
    if isinstance(value, dict):
        # Pairs, because an optimizer's state has integer keys.
        return {"items": [[key, _encode(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(item, tensors) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be stored: use tensors and plain values")


def _decode(value: Any, tensors: list[Tensor]) -> Any:  # noqa: ANN401
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "bfloat16":
        return tensors[content].view(torch.bfloat16)
    if kind == "items":
        return {key: _decode(item, tensors) for key, item in content}
    items = [_decode(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
