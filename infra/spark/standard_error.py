"""Keep standard error apart from standard output under spark-submit."""

import os
from pathlib import Path


def separate_standard_error() -> None:
    """Send standard error where spark-submit sends its own; without spark-submit do nothing.

    spark-submit joins both streams of a Python program into its standard output. They stay
    joined where there is no /proc, and where the user joined them too (`2>&1`).
    """
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return
    streams_of_parent = Path("/proc", str(os.getppid()), "fd")
    try:
        if (streams_of_parent / "1").samefile(streams_of_parent / "2"):
            return
        descriptor = os.open(streams_of_parent / "2", os.O_WRONLY | os.O_APPEND)
    except OSError:  # no /proc, or standard error is a socket, which has no name to open
        return
    os.dup2(descriptor, 2)
    os.close(descriptor)
