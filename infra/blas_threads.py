"""Let OpenBLAS multiply matrices in one thread, so that no result depends on the host's cores.

Its threads would add in an order that depends on their number, and so would the decision tree's
last bits and all that learns from it. They also made the bootstrap alignment 30 times slower on
two busy cores.
"""

import os

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}


def use_one_thread() -> None:
    """Limit this process and those that it starts; call it before NumPy is imported."""
    os.environ.update(ONE_THREAD)
