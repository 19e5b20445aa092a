"""Nested state of arrays and plain values to bytes and back, without pickle.

An npz of the arrays, in order, and a JSON structure that refers to them by number and kind.
"""

import io
import json
import math
import struct
import tokenize
import zlib
from collections.abc import Callable, Mapping
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
from numpy.lib.format import read_array_header_1_0, read_magic

from infra.settings import printable

STRUCTURE, ARRAY = "structure", "array"
_NUMBERS = "biufc"
"""The kinds of NumPy's types that are stored: booleans and numbers."""

_REFUSED = (
    *(AttributeError, EOFError, LookupError, NotImplementedError, OSError, OverflowError),
    *(RecursionError, RuntimeError, SyntaxError, TypeError, ValueError),
    *(BadZipFile, struct.error, tokenize.TokenError, zlib.error),
)
"""The errors by which zipfile, NumPy, json and torch refuse bytes."""

Kinds = Mapping[str, Callable[[np.ndarray], Any]]
"""By kind, what becomes of an array that is read."""
ARRAYS: Kinds = {ARRAY: np.asarray}


def array_kind(value: object) -> tuple[str, np.ndarray] | None:
    """Return what is stored of an array, with its kind; None for anything else."""
    return (ARRAY, value) if isinstance(value, np.ndarray) else None


def encode_arrays(
    state: object, kind_of: Callable[[object], tuple[str, np.ndarray] | None] = array_kind
) -> bytes:
    """Encode dictionaries, lists, tuples, arrays, numbers, text, booleans and None.

    `kind_of` says which values are arrays, or become some, and of which kind.
    """
    arrays: list[np.ndarray] = []
    text = np.frombuffer(json.dumps(_encode(state, arrays, kind_of)).encode(), np.uint8)
    numbered = {str(index): array for index, array in enumerate(arrays)}
    buffer = io.BytesIO()
    # NumPy 2.0 has no allow_pickle, and nothing to pickle in numbers.
    np.savez(buffer, **{STRUCTURE: text}, **numbered)  # type: ignore[arg-type]
    return buffer.getvalue()


def decode_arrays(data: bytes, kinds: Kinds = ARRAYS) -> Any:  # noqa: ANN401
    """Invert `encode_arrays`; raise ValueError if the bytes are not such a state."""
    try:
        with ZipFile(io.BytesIO(data)) as archive:
            structure = json.loads(_array(archive, STRUCTURE).tobytes())
            names = range(len(archive.namelist()) - 1)
            arrays = [_array(archive, str(name)) for name in names]
        return _decode(structure, arrays, kinds)
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
        if dtype.kind not in _NUMBERS or min(shape, default=0) < 0 or num_bytes > member.file_size:
            raise ValueError(f"{name} = {dtype} {shape} in {member.file_size} bytes")
        content = bytearray(file.read())  # to its end, where its CRC is compared
    if len(content) != num_bytes:
        raise ValueError(f"{name} has {len(content)} bytes: need {num_bytes}")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if is_fortran else "C")


def _encode(
    value: object,
    arrays: list[np.ndarray],
    kind_of: Callable[[object], tuple[str, np.ndarray] | None],
) -> object:
    if (found := kind_of(value)) is not None:
        kind, array = found
        if array.dtype.kind not in _NUMBERS:
            raise TypeError(f"an array of {array.dtype} cannot be stored: need numbers")
        arrays.append(array)
        return {kind: len(arrays) - 1}
    if isinstance(value, dict):
        # Pairs, because an optimizer's state has integer keys.
        return {"items": [[key, _encode(item, arrays, kind_of)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(item, arrays, kind_of) for item in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a {type(value).__name__} cannot be stored: use arrays and plain values")


def _decode(value: Any, arrays: list[np.ndarray], kinds: Kinds) -> Any:  # noqa: ANN401
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in kinds:
        if type(content) is not int or content < 0:
            raise ValueError(f"{kind} {content!r}: need its number")
        return kinds[kind](arrays[content])
    if kind == "items":
        return {key: _decode(item, arrays, kinds) for key, item in content}
    if kind not in ("list", "tuple"):
        raise ValueError(f"{kind!r}: need {', '.join(kinds)}, items, list or tuple")
    items = [_decode(item, arrays, kinds) for item in content]
    return tuple(items) if kind == "tuple" else items
