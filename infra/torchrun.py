"""How this process was launched: the one place that reads what torchrun tells its processes."""

import os
import sys
import threading
import time

_ROUND_S = 1.0


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank() -> int:
    """The rank that torchrun gave this process; 0 if it was started otherwise."""
    return int(os.environ["RANK"]) if is_launched() else 0


def end_with_launcher() -> None:
    """From now on end this process, a second or so later, if the one that started it ends.

    A killed torchrun leaves its ranks behind, which would train on beside those of a new start.
    """
    launcher_id = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher_id:
            time.sleep(_ROUND_S)
        print(
            f"rank {launched_rank()} (process {os.getpid()}): process {launcher_id}, which started "
            "it, is gone: ending, so that a new start finds no rival",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()
