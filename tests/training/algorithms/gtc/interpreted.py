"""Import the Triton kernels under Triton's interpreter, which needs no GPU."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the next line's import makes the kernels

from training.algorithms.gtc import cuda_encoding

__all__ = ["cuda_encoding"]
