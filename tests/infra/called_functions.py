"""Functions that tests call in other processes; they import little, as each start imports them."""

import ctypes
import os
import signal
import time
from pathlib import Path


def made_by() -> int:
    """The context of the tests: the process that made it."""
    return os.getpid()


def place(context: int) -> tuple[int, int]:
    return context, os.getpid()


def spin(_: int) -> None:
    while True:
        pass


def burn(_: int, seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def fail(_: int) -> None:
    raise ValueError("7 frames: need 8")


def be_killed_once(_: int, mark: Path) -> str:
    if not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "whole"


def crash(_: int) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hold_gil(_: int, seconds: int) -> None:
    """Let no other thread of the process run meanwhile, as kaldi-decoder's search does."""
    ctypes.PyDLL(None).sleep(seconds)
