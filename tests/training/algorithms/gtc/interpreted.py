"""The Triton kernels, run by Triton's interpreter: they need no GPU."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # read when the next line's import makes the kernels

from training.algorithms.gtc import cuda_encoding

__all__ = ["cuda_encoding"]
