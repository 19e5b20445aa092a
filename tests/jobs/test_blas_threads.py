"""Steps multiply matrices in one thread, though the environment asks for two."""

import os
import subprocess
import sys

PROGRAM = """\
import jobs.bootstrap
from threadpoolctl import threadpool_info

print({each["num_threads"] for each in threadpool_info() if each["user_api"] == "blas"})
"""


def test_a_step_multiplies_matrices_in_one_thread() -> None:
    """Other orders of sums would give trees of other bits on hosts with other cores."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "{1}\n"
