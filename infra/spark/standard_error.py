"""Keep standard error apart from standard output under spark-submit."""

import os
from pathlib import Path


def separate_standard_error() -> None:
    """Write standard error where spark-submit's own goes; elsewhere, change nothing.

    spark-submit joins a Python program's two streams into its standard output. Without /proc,
    or where the user has joined them too (`2>&1`), they stay joined.
    """
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return
    streams_of_parent = Path("/proc", str(os.getppid()), "fd")
    try:
        if (streams_of_parent / "1").samefile(streams_of_parent / "2"):
            return
        descriptor = os.open(streams_of_parent / "2", os.O_WRONLY | os.O_APPEND)
    except OSError:  # no /proc, or a socket, which cannot be opened by name
        return
    os.dup2(descriptor, 2)
    os.close(descriptor)
