"""Nested state of tensors and plain values to bytes and back, without pickle.

An npz of the tensors, in order, and a JSON structure that refers to them by number.
"""

import io
import json
import math
import struct
import tokenize
import zlib
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
import torch
from numpy.lib.format import read_array_header_1_0, read_magic
from torch import Tensor

from infra.settings import printable

STRUCTURE = "structure"

_REFUSED = (
    *(AttributeError, EOFError, LookupError, NotImplementedError, OSError, OverflowError),
    *(RecursionError, RuntimeError, SyntaxError, TypeError, ValueError),
    *(BadZipFile, struct.error, tokenize.TokenError, zlib.error),
)
"""The errors by which zipfile, NumPy, json and torch refuse bytes."""


def encode_state(state: object) -> bytes:
    """Encode dictionaries, lists, tuples, tensors, numbers, text, booleans and None."""
    tensors: list[Tensor] = []
    structure = _encode(state, tensors)
    arrays = {str(index): tensor.detach().cpu().numpy() for index, tensor in enumerate(tensors)}
    text = np.frombuffer(json.dumps(structure).encode(), np.uint8)
    buffer = io.BytesIO()
    # NumPy 2.0 has no allow_pickle, and nothing to pickle in numbers.
    np.savez(buffer, **{STRUCTURE: text}, **arrays)  # type: ignore[arg-type]
    return buffer.getvalue()


def decode_state(data: bytes) -> Any:  # noqa: ANN401
    """Invert `encode_state`; raise ValueError if the bytes are not such a state."""
    try:
        with ZipFile(io.BytesIO(data)) as archive:
            structure = json.loads(_array(archive, STRUCTURE).tobytes())
            names = range(len(archive.namelist()) - 1)
            tensors = [torch.from_numpy(_array(archive, str(name))) for name in names]
        return _decode(structure, tensors)
    except _REFUSED as error:
        said = printable(f"{type(error).__name__}: {error}")
        raise ValueError(f"{len(data)} bytes are no state of megahour: {said}") from error


def _array(archive: ZipFile, name: str) -> np.ndarray:
    """Read a member as NumPy wrote it. It is as large as it says: nothing is allocated for more."""
    member = archive.getinfo(f"{name}.npy")
    if member.compress_type != ZIP_STORED or member.file_size != member.compress_size:
        raise ValueError(f"{name} is compressed: need an array as it is")
    with archive.open(member) as file:
        if read_magic(file) != (1, 0):
            raise ValueError(f"{name} is in another version of NumPy's format: need 1.0")
        shape, is_fortran, dtype = read_array_header_1_0(file)
        num_bytes = math.prod(shape) * dtype.itemsize
        if dtype.kind not in "biuf" or min(shape, default=0) < 0 or num_bytes > member.file_size:
            raise ValueError(f"{name} = {dtype} {shape} in {member.file_size} bytes")
        content = bytearray(file.read())  # to its end, where its CRC is compared
    if len(content) != num_bytes:
        raise ValueError(f"{name} has {len(content)} bytes: need {num_bytes}")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C")


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
    if kind in ("tensor", "bfloat16"):
        if type(content) is not int or content < 0:
            raise ValueError(f"tensor {content!r}: need its number")
        return tensors[content].view(torch.bfloat16) if kind == "bfloat16" else tensors[content]
    if kind == "items":
        return {key: _decode(item, tensors) for key, item in content}
    if kind not in ("list", "tuple"):
        raise ValueError(f"{kind!r}: need tensor, bfloat16, items, list or tuple")
    items = [_decode(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
