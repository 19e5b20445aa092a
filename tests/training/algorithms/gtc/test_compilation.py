"""The loops in C are compiled on installation, and the kernels of Triton for a GPU."""

import json
import os
import shutil
import subprocess
import sys

from training.algorithms.gtc.encoding import is_compiled


def test_loops_are_compiled_where_there_is_a_compiler() -> None:
    """The loops are compiled if there is a compiler: an error in the C file fails here."""
    assert is_compiled() or shutil.which("cc") is None


def test_kernels_compile_for_a_gpu() -> None:
    """All kernels compile; the streaming one loads four words at a time in float32."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.training.algorithms.gtc.compiled_kernels"]
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = json.loads(done.stdout)
    assert len(kernels) == 8
    assert all(kernel["bytes"] > 0 for kernel in kernels.values())
    assert kernels["accumulate fp32"]["wide_loads"] >= 16
