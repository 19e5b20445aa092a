"""Read what torchrun sets in the environment of its ranks, and end a rank that it left behind."""

import os
import sys
import threading
import time

_ROUND_S = 1.0


class _Starter:
    """_Starter: the process that started this one, seen before torch is imported for seconds."""

    process_id = os.getppid()
    is_watched = False


def _see_starter() -> None:
    _Starter.process_id = os.getppid()
    _Starter.is_watched = False


# A forked process has the modules of its parent, and another starter.
os.register_at_fork(after_in_child=_see_starter)


def set_threads_of_ranks() -> None:
    """Set one OpenMP thread a rank unless the user did; torchrun would, with a warning."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def is_launched() -> bool:
    """Return whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launched_rank() -> int:
    """Return the rank that torchrun gave this process, or 0 if it was started otherwise."""
    return int(os.environ["RANK"]) if is_launched() else 0


def launched_local_rank() -> int:
    """Return the number that torchrun gave this process among those of its host, or 0."""
    return int(os.environ["LOCAL_RANK"]) if is_launched() else 0


def launched_ranks_per_host() -> int:
    """Return the number of ranks that torchrun started on this host, or 1."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if is_launched() else 1


def end_with_launcher() -> None:
    """Watch the process that started this one, and exit with status 1 within about 1 s of its end.

    A killed torchrun leaves its ranks behind. They would otherwise train on beside the ranks of
    the next start. torchrun's ranks watch it from this module's import on. The exit runs no
    cleanup and writes one line to standard error. Another call does nothing.
    """
    if _Starter.is_watched:
        return
    _Starter.is_watched = True
    starter_id = _Starter.process_id

    def watch() -> None:
        while os.getppid() == starter_id:
            time.sleep(_ROUND_S)
        print(
            f"rank {launched_rank()} (process {os.getpid()}): process {starter_id}, which started "
            "it, is gone: ending, so that the next start has no rival",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


if is_launched():
    # The imports of torch and Kaldi follow: 39 s on a busy host, with torchrun dead all the while.
    end_with_launcher()
