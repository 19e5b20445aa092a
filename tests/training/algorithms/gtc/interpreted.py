"""Import the Triton kernels under Triton's interpreter, which needs no GPU.

A load that a mask leaves out, and that names no other value, reads 3: on a GPU it reads anything.
"""

import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when the import of the kernels makes them

import numpy as np
from triton.runtime import interpreter

from training.algorithms.gtc import cuda_encoding

__all__ = ["cuda_encoding"]

_load = interpreter.InterpreterBuilder.create_masked_load


def _load_anything(builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
    if other is None:
        kind = pointers.get_element_ty()
        values = np.full(pointers.data.shape, 3, dtype=interpreter._get_np_dtype(kind))
        other = interpreter.TensorHandle(values, kind)
    return _load(builder, pointers, mask, other, *rest)


interpreter.InterpreterBuilder.create_masked_load = _load_anything
