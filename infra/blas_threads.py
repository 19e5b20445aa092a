"""Compute products of matrices in one thread, in the driver and in each task.

A BLAS splits a product among its threads, as many as the host has cores: the order of its sums, and
so the last bits, the tree that grows from them and all that learns from that, would depend on the
host. Its threads also made the bootstrap alignment 30 times slower on two busy cores.
"""


def use_one_blas_thread() -> None:
    """Let NumPy's BLAS compute in one thread from now on, whatever the environment asks for."""
    # Here, as `megahour status` imports this module where there is no NumPy.
    import numpy  # noqa: F401, PLC0415 - a BLAS that is loaded later would keep its threads
    from threadpoolctl import threadpool_limits  # noqa: PLC0415

    threadpool_limits(limits=1, user_api="blas")
